#include "tp/module_options.hpp"

#include "tp/distributions.hpp"
#include "tp/lm_head.hpp"

#include <cstddef>
#include <limits>
#include <memory>
#include <string_view>
#include <utility>

namespace smp {

namespace {

native_module of_type(std::string_view type) {
  native_module result{.type = std::string{type}};
  result.how = find_distribution(type);
  return result;
}

native_module of_layer(std::string_view type, transformer_layer_options x) {
  auto result = of_type(type);
  result.layer = std::make_shared<transformer_layer_options>(std::move(x));
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
  result.max_norm = x.max_norm;
  result.norm_type = x.norm_type;
  result.scale_grad_by_freq = x.scale_grad_by_freq;
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
  return of_layer("TransformerLayer", x);
}

native_module described(const attention_layer_options& x) {
  transformer_layer_options o;
  o.num_attention_heads = x.num_attention_heads;
  o.pre_layernorm = x.pre_layernorm;
  o.post_layernorm = x.post_layernorm;
  o.scale = x.scale;
  o.causal = x.causal;
  o.causal_mask_size = x.causal_mask_size;
  o.window = x.window;
  o.rms_norm = x.rms_norm;
  o.training = x.training;
  auto& linears = x.query_key_value;
  if (x.context == 0) {
    o.takes_mask = x.mask > 0;
    o.mask_position = x.mask;
    o.attention_norm = x.norm;
    o.attention_post_norm = x.post_norm;
    o.query_key_value = linears;
    o.attention_output = x.output;
    o.attention_dropout = x.dropout;
    o.attention_output_dropout = x.output_dropout;
    return of_layer("AttentionLayer", std::move(o));
  }
  auto complete = linears.size() == 3;
  if (complete)
    o.cross_attention = {x.norm,   linears[0], linears[1],       linears[2],
                         x.output, x.dropout,  x.output_dropout, x.post_norm};
  o.context_position = x.context;
  o.context_mask_position = x.mask > 0 ? x.mask
                                       : std::numeric_limits<size_t>::max();
  auto result = of_layer("AttentionLayer", std::move(o));
  if (!complete)
    result.doubt
      = "it attends to something else; its options have to name "
        "three linears (query_key_value)";
  return result;
}

native_module described(const transformer_output_layer_options& x) {
  transformer_layer_options o;
  o.pre_layernorm = x.pre_layernorm;
  o.post_layernorm = x.post_layernorm;
  o.rms_norm = x.rms_norm;
  o.activation = x.activation;
  o.training = x.training;
  o.output_norm = x.norm;
  o.output_post_norm = x.post_norm;
  o.intermediate = x.intermediate;
  o.gate = x.gate;
  o.output = x.output;
  o.inner_dropout = x.inner_dropout;
  o.output_dropout = x.output_dropout;
  return of_layer("TransformerOutputLayer", std::move(o));
}

native_module described(const lm_head_options& x) {
  native_module result{.type = "LMHead"};
  result.how = &nn::lm_head_distribution;
  result.own_names = {{"weight", x.weight}, {"bias", x.bias}};
  result.options = std::make_shared<lm_head_options>(x);
  return result;
}

} // namespace smp
