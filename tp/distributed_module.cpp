#include "tp/distributed_module.hpp"

#include "tp/embedding.hpp"
#include "tp/linear.hpp"

#include <algorithm>
#include <array>

namespace smp {

namespace {

const std::array<distribution, 3> all_distributions{
  nn::conv1d_distribution, nn::embedding_distribution, nn::linear_distribution};

} // namespace

at::Tensor tensor_slice::of(const at::Tensor& x) const {
  return x.narrow(dim, begin, length);
}

distributed_module::~distributed_module() = default;

const distribution* find_distribution(std::string_view type) {
  auto i = std::ranges::find(all_distributions, type, &distribution::type);
  return i == all_distributions.end() ? nullptr : &*i;
}

} // namespace smp
