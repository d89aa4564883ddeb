#include "tp/distributions.hpp"

#include "tp/embedding.hpp"
#include "tp/layer_norm.hpp"
#include "tp/linear.hpp"
#include "tp/transformer/transformer_layer.hpp"

#include <algorithm>
#include <array>

namespace smp {

namespace {

const std::array<distribution, 7> all_distributions{
  nn::attention_layer_distribution,
  nn::conv1d_distribution,
  nn::embedding_distribution,
  nn::layer_norm_distribution,
  nn::linear_distribution,
  nn::transformer_layer_distribution,
  nn::transformer_output_layer_distribution};

} // namespace

std::string known_distributions() {
  std::string result;
  for (auto& x : all_distributions)
    if (!x.of_layer) {
      result += result.empty() ? "" : ", ";
      result += x.type;
    }
  return result;
}

const distribution* find_distribution(std::string_view type) {
  auto i = std::ranges::find(all_distributions, type, &distribution::type);
  return i == all_distributions.end() ? nullptr : &*i;
}

} // namespace smp
