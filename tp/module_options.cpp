#include "tp/module_options.hpp"

#include "tp/distributions.hpp"
#include "tp/lm_head.hpp"

#include <memory>
#include <string_view>

namespace smp {

namespace {

native_module of_type(std::string_view type) {
  native_module result{.type = std::string{type}};
  result.how = find_distribution(type);
  return result;
}

} // namespace

native_module described(const linear_options& x) {
  auto result = of_type(x.inputs_first ? "Conv1D" : "Linear");
  result.own_names = {{"weight", x.weight}, {"bias", x.bias}};
  return result;
}

native_module described(const embedding_options& x) {
  auto result = of_type("Embedding");
  result.own_names = {{"weight", x.weight}};
  result.padding_idx = x.padding_idx;
  result.sparse = x.sparse;
  return result;
}

native_module described(const layer_norm_options& x) {
  auto result = of_type("LayerNorm");
  result.own_names = {{"weight", x.weight}, {"bias", x.bias}};
  result.normalized_shape = x.normalized_shape;
  result.eps = x.eps;
  return result;
}

native_module described(const transformer_layer_options& x) {
  auto result = of_type("TransformerLayer");
  result.layer = std::make_shared<transformer_layer_options>(x);
  return result;
}

native_module described(const lm_head_options& x) {
  native_module result{.type = "LMHead"};
  result.how = &nn::lm_head_distribution;
  result.own_names = {{"weight", x.weight}};
  result.options = std::make_shared<lm_head_options>(x);
  return result;
}

} // namespace smp
