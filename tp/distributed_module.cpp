#include "tp/distributed_module.hpp"

#include "tp/embedding.hpp"
#include "tp/layer_norm.hpp"
#include "tp/linear.hpp"
#include "tp/transformer_layer.hpp"

#include <ATen/ops/cat.h>

#include <algorithm>
#include <array>

namespace smp {

namespace {

const std::array<distribution, 5> all_distributions{
  nn::conv1d_distribution, nn::embedding_distribution,
  nn::layer_norm_distribution, nn::linear_distribution,
  nn::transformer_layer_distribution};

} // namespace

at::Tensor tensor_slice::of(const at::Tensor& x) const {
  if (blocks == 1)
    return x.narrow(dim, begin, length);
  return x.unflatten(dim, {blocks, -1})
    .narrow(dim + 1, begin, length)
    .flatten(dim, dim + 1);
}

at::Tensor tensor_slice::merged(const std::vector<at::Tensor>& parts) const {
  if (blocks == 1)
    return at::cat(parts, dim);
  std::vector<at::Tensor> xs;
  for (auto& x : parts)
    xs.push_back(x.unflatten(dim, {blocks, -1}));
  return at::cat(xs, dim + 1).flatten(dim, dim + 1);
}

std::vector<tensor_slice> tensor_slice::ranges() const {
  auto size = whole.at(static_cast<size_t>(dim)) / blocks;
  std::vector<tensor_slice> result;
  for (int64_t i = 0; i < blocks; ++i)
    result.push_back({dim, i * size + begin, length, whole});
  return result;
}

distributed_module::~distributed_module() = default;

const distribution* find_distribution(std::string_view type) {
  auto i = std::ranges::find(all_distributions, type, &distribution::type);
  return i == all_distributions.end() ? nullptr : &*i;
}

} // namespace smp
