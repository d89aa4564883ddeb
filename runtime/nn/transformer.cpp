#include "runtime/nn/transformer.hpp"

#include "runtime/nn/layer_row.hpp"
#include "runtime/nn/layers.hpp"
#include "runtime/nn/sizes.hpp"
#include "runtime/sharing/tp_register.hpp"
#include "tp/transformer/attention_mask.hpp"
#include "transport/error.hpp"

#include <torch/nn/init.h>

#include <fmt/format.h>

#include <array>
#include <cmath>
#include <utility>

namespace smp::nn {

namespace {

using arguments_t = transformer_layer_arguments;

struct activation_name {
  const char* name;
  torch::Tensor (*apply)(const torch::Tensor&);
};

constexpr std::array<activation_name, 4> activations{{
  {"gelu", [](const torch::Tensor& x) { return torch::gelu(x); }},
  {"gelu_new", [](const torch::Tensor& x) { return torch::gelu(x, "tanh"); }},
  {"relu", [](const torch::Tensor& x) { return torch::relu(x); }},
  {"silu", [](const torch::Tensor& x) { return torch::silu(x); }},
}};

/// @returns null if there is none of this name
const activation_name* find_activation(const std::string& name) {
  for (auto& x : activations)
    if (x.name == name)
      return &x;
  return nullptr;
}

torch::nn::LayerNormOptions norm_options(const arguments_t& x) {
  return torch::nn::LayerNormOptions({x.hidden_size}).eps(x.layernorm_epsilon);
}

submodule<torch::nn::Linear> make_linear(const arguments_t& x, int64_t in,
                                         int64_t out) {
  submodule<torch::nn::Linear> result{in, out};
  if (x.use_normal_initialization)
    init_linear(*result, x.initializer_range);
  return result;
}

int64_t attended(const arguments_t& x) {
  return x.num_attention_heads * x.attention_head_size;
}

/// Attention, with dropout on its weights.
/// q: [B, H, T, D]; k, v: [B, H, S, D]; mask: broadcast to [B, H, T, S], or
/// undefined
/// @param causal a token sees no later one
/// @returns [B, H, T, D]
torch::Tensor weighted(const torch::Tensor& q, const torch::Tensor& k,
                       const torch::Tensor& v, torch::Tensor mask,
                       bool is_causal, std::optional<double> scale, double p) {
  if (is_causal && (mask.defined() || p > 0)) {
    mask = both_masks(causal_mask(q.size(2), q.device()), mask);
    is_causal = false;
  }
  if (p == 0)
    return torch::scaled_dot_product_attention(
      q, k, v, mask.defined() ? std::optional{mask} : std::nullopt, 0,
      is_causal, scale);
  auto scores = torch::matmul(
    q * scale.value_or(1 / std::sqrt(static_cast<double>(q.size(3)))),
    k.transpose(2, 3));
  auto weights = torch::dropout(torch::softmax(masked(scores, mask), -1), p,
                                /*train=*/true);
  return torch::matmul(weights, v);
}

/// Makes the norms of a part of a layer.
template <class Part>
void add_norms(Part& part) {
  auto& x = part.arguments;
  if (x.pre_layernorm || x.post_layernorm) {
    part.layernorm = submodule<torch::nn::LayerNorm>(norm_options(x));
    part.register_module("layernorm", part.layernorm);
  }
  if (x.pre_layernorm && x.post_layernorm) {
    part.post_layernorm = submodule<torch::nn::LayerNorm>(norm_options(x));
    part.register_module("post_layernorm", part.post_layernorm);
  }
}

/// h + f(n(h)), then a norm of that; each norm only if it exists.
template <class Part, class F>
torch::Tensor residual(Part& part, const torch::Tensor& h, F f) {
  auto& x = part.arguments;
  auto y = h + f(x.pre_layernorm ? part.layernorm(h) : h);
  if (!x.post_layernorm)
    return y;
  return x.pre_layernorm ? part.post_layernorm(y) : part.layernorm(y);
}

[[noreturn]] void refuse_states(size_t size, bool cross) {
  throw error{
    error_code::user_code,
    fmt::format("a transformer layer {} expects {}; it got {} tensors",
                cross ? "with cross-attention" : "of itself",
                cross ? "hidden states, a mask, what they attend "
                        "to, and the mask of that"
                      : "hidden states and perhaps a mask",
                size)};
}

// -- what tensor-parallel ranks have to know ----------------------------------

transformer_layer_options
options_of(const distributed_transformer_layer_impl& x) {
  auto& a = x.arguments;
  transformer_layer_options result;
  result.num_attention_heads = a.num_attention_heads;
  result.pre_layernorm = a.pre_layernorm;
  result.post_layernorm = a.post_layernorm;
  result.scale = a.attention_scale;
  result.causal = a.causal_mask_size.has_value();
  result.causal_mask_size = a.causal_mask_size.value_or(0);
  result.takes_mask = true;
  result.returns_arguments = true;
  result.activation = find_activation(a.activation)->apply;
  auto eps = a.layernorm_epsilon;
  result.attention_norm = {"attention.layernorm", eps};
  result.attention_post_norm = {"attention.post_layernorm", eps};
  result.output_norm = {"output.layernorm", eps};
  result.output_post_norm = {"output.post_layernorm", eps};
  result.query_key_value = {
    {"attention.query"}, {"attention.key"}, {"attention.value"}};
  result.attention_output = {"attention.dense"};
  result.intermediate = {"output.dense1"};
  result.output = {"output.dense2"};
  auto weights = a.attention_dropout_prob, hidden = a.hidden_dropout_prob;
  result.attention_dropout = {"attention", weights};
  result.attention_output_dropout = {"attention.dropout", hidden};
  result.output_dropout = {"output.dropout", hidden};
  if (a.add_cross_attention)
    result.cross_attention = {{"crossattention.layernorm", eps},
                              {"crossattention.query"},
                              {"crossattention.key"},
                              {"crossattention.value"},
                              {"crossattention.dense"},
                              {"crossattention", weights},
                              {"crossattention.dropout", hidden},
                              {"crossattention.post_layernorm", eps}};
  return result;
}

attention_layer_options
options_of_attention(const distributed_attention_layer_impl& x) {
  auto& a = x.arguments;
  attention_layer_options result;
  result.num_attention_heads = a.num_attention_heads;
  result.pre_layernorm = a.pre_layernorm;
  result.post_layernorm = a.post_layernorm;
  result.scale = a.attention_scale;
  result.causal = !x.cross && a.causal_mask_size;
  result.causal_mask_size = x.cross ? 0 : a.causal_mask_size.value_or(0);
  result.context = x.cross ? 1 : 0;
  result.mask = 2;
  result.norm = {"layernorm", a.layernorm_epsilon};
  result.post_norm = {"post_layernorm", a.layernorm_epsilon};
  result.query_key_value = {{"query"}, {"key"}, {"value"}};
  result.output = {"dense"};
  result.dropout = {"", a.attention_dropout_prob};
  result.output_dropout = {"dropout", a.hidden_dropout_prob};
  return result;
}

transformer_output_layer_options
options_of_output(const distributed_transformer_output_layer_impl& x) {
  auto& a = x.arguments;
  transformer_output_layer_options result;
  result.pre_layernorm = a.pre_layernorm;
  result.post_layernorm = a.post_layernorm;
  result.activation = find_activation(a.activation)->apply;
  result.norm = {"layernorm", a.layernorm_epsilon};
  result.post_norm = {"post_layernorm", a.layernorm_epsilon};
  result.intermediate = {"dense1"};
  result.output = {"dense2"};
  result.output_dropout = {"dropout", a.hidden_dropout_prob};
  return result;
}

/// Attention is called without a mask, and self-attention perhaps without a
/// context; modules that ranks share take no undefined tensors.
layer_states defined_arguments(const torch::Tensor& hidden,
                               const torch::Tensor& context,
                               const torch::Tensor& mask) {
  layer_states result{hidden, context.defined() ? context : hidden};
  if (mask.defined())
    result.push_back(mask);
  return result;
}

[[maybe_unused]] const bool layers_are_registered
  = tp_register<distributed_transformer_layer_impl,
                distributed_transformer_layer>(options_of)
    && tp_register<distributed_attention_layer_impl,
                   distributed_attention_layer>(options_of_attention,
                                                defined_arguments)
    && tp_register<distributed_transformer_output_layer_impl,
                   distributed_transformer_output_layer>(options_of_output);

} // namespace

// -- arguments ----------------------------------------------------------------

void validate(const transformer_layer_arguments& x) {
  require_positive("num_attention_heads", x.num_attention_heads);
  require_positive("attention_head_size", x.attention_head_size);
  require_positive("hidden_size", x.hidden_size);
  require_positive("intermediate_size", x.intermediate_size);
  require_probability("attention_dropout_prob", x.attention_dropout_prob);
  require_probability("hidden_dropout_prob", x.hidden_dropout_prob);
  if (x.causal_mask_size)
    require_positive("causal_mask_size", *x.causal_mask_size);
  if (!find_activation(x.activation)) {
    std::string names;
    for (auto& known : activations)
      names += fmt::format("{}\"{}\"", names.empty() ? "" : ", ", known.name);
    throw config_error(
      fmt::format("activation = \"{}\" is not known; "
                  "allowed: {}",
                  x.activation, names));
  }
}

void validate(const transformer_arguments& x) {
  require_positive("num_layers", x.num_layers);
  validate(static_cast<const transformer_layer_arguments&>(x));
}

void validate(const transformer_lm_head_arguments& x) {
  require_positive("vocab_size", x.vocab_size);
  require_positive("num_positions", x.num_positions);
  if (x.num_token_types < 0)
    throw config_error(fmt::format("num_token_types is {}, must be at least 0",
                                   x.num_token_types));
  validate(static_cast<const transformer_arguments&>(x));
}

// -- the parts of a layer -----------------------------------------------------

distributed_attention_layer_impl::distributed_attention_layer_impl(
  const transformer_layer_arguments& x, bool cross)
  : arguments(x),
    cross(cross),
    query(make_linear(x, x.hidden_size, attended(x))),
    key(make_linear(x, x.hidden_size, attended(x))),
    value(make_linear(x, x.hidden_size, attended(x))),
    dense(make_linear(x, attended(x), x.hidden_size)),
    dropout(x.hidden_dropout_prob) {
  add_norms(*this);
  register_module("query", query);
  register_module("key", key);
  register_module("value", value);
  register_module("dense", dense);
  register_module("dropout", dropout);
}

torch::Tensor distributed_attention_layer_impl::forward(torch::Tensor hidden,
                                                        torch::Tensor context,
                                                        torch::Tensor mask) {
  auto heads = [&](const torch::Tensor& x) {
    return split_heads(x, arguments.num_attention_heads);
  };
  if (!cross)
    check_causal_mask_size(hidden.size(1),
                           arguments.causal_mask_size.value_or(0));
  return residual(*this, hidden, [&](const torch::Tensor& h) {
    auto& seen = cross ? context : h;
    auto y = weighted(heads(query(h)), heads(key(seen)), heads(value(seen)),
                      mask, !cross && arguments.causal_mask_size,
                      arguments.attention_scale,
                      is_training() ? arguments.attention_dropout_prob : 0.0);
    return dropout(dense(merge_heads(y)));
  });
}

distributed_transformer_output_layer_impl::
  distributed_transformer_output_layer_impl(
    const transformer_layer_arguments& x)
  : arguments(x),
    dense1(make_linear(x, x.hidden_size, x.intermediate_size)),
    dense2(make_linear(x, x.intermediate_size, x.hidden_size)),
    dropout(x.hidden_dropout_prob) {
  add_norms(*this);
  register_module("dense1", dense1);
  register_module("dense2", dense2);
  register_module("dropout", dropout);
}

torch::Tensor
distributed_transformer_output_layer_impl::forward(torch::Tensor x) {
  auto* activate = find_activation(arguments.activation)->apply;
  return residual(*this, x, [&](const torch::Tensor& h) {
    return dropout(dense2(activate(dense1(h))));
  });
}

// -- layers -------------------------------------------------------------------

distributed_transformer_layer_impl::distributed_transformer_layer_impl(
  const transformer_layer_arguments& x)
  : arguments((validate(x), x)), attention(x), output(x) {
  register_module("attention", attention);
  if (x.add_cross_attention) {
    crossattention = submodule<distributed_attention_layer>(x, true);
    register_module("crossattention", crossattention);
  }
  register_module("output", output);
}

layer_states distributed_transformer_layer_impl::forward(layer_states x) {
  auto cross = arguments.add_cross_attention;
  if (cross ? x.size() != 4 : x.empty() || x.size() > 2)
    refuse_states(x.size(), cross);
  auto& h = x[0];
  h = attention(h, h, x.size() > 1 ? x[1] : torch::Tensor{});
  if (cross)
    h = crossattention(h, x[2], x[3]);
  h = output(h);
  return x;
}

distributed_transformer_impl::distributed_transformer_impl(
  const transformer_arguments& x)
  : arguments((validate(x), x)) {
  for (int64_t i = 0; i < x.num_layers; ++i)
    seq_layers->push_back(distributed_transformer_layer(x));
  register_module("seq_layers", seq_layers);
}

layer_states distributed_transformer_impl::forward(layer_states x) {
  return run_in_row<layer_states>(seq_layers, std::move(x));
}

// -- the whole ----------------------------------------------------------------

distributed_transformer_lm_head_impl::distributed_transformer_lm_head_impl(
  const transformer_lm_head_arguments& x)
  : arguments((validate(x), x)),
    word_embedding(x.vocab_size, x.hidden_size),
    position_embedding(x.num_positions, x.hidden_size),
    dropout(x.hidden_dropout_prob),
    transformer(x) {
  auto begin = [&](torch::nn::EmbeddingImpl& table) {
    torch::nn::init::normal_(table.weight, 0, x.initializer_range);
  };
  register_module("word_embedding", word_embedding);
  register_module("position_embedding", position_embedding);
  begin(*word_embedding);
  begin(*position_embedding);
  if (x.num_token_types > 0) {
    token_type_embedding = submodule<torch::nn::Embedding>(x.num_token_types,
                                                           x.hidden_size);
    register_module("token_type_embedding", token_type_embedding);
    begin(*token_type_embedding);
  }
  register_module("dropout", dropout);
  register_module("transformer", transformer);
  if (x.pre_layernorm) {
    layernorm = submodule<torch::nn::LayerNorm>(norm_options(x));
    register_module("layernorm", layernorm);
  }
  if (x.add_lm_head) {
    lm_head = distributed_lm_head(word_embedding->weight);
    register_module("lm_head", lm_head);
  }
}

torch::Tensor distributed_transformer_lm_head_impl::forward(
  torch::Tensor tokens, torch::Tensor attention_mask,
  torch::Tensor token_type_ids, torch::Tensor context,
  torch::Tensor context_mask) {
  auto h = run(tokens, attention_mask, token_type_ids, context, context_mask);
  return lm_head ? lm_head(h, std::nullopt) : h;
}

torch::Tensor distributed_transformer_lm_head_impl::loss(
  torch::Tensor tokens, torch::Tensor labels, torch::Tensor attention_mask,
  torch::Tensor token_type_ids, torch::Tensor context,
  torch::Tensor context_mask) {
  if (!lm_head)
    throw error{error_code::unsupported,
                "loss() of a model without scores: add_lm_head is false"};
  return lm_head(
    run(tokens, attention_mask, token_type_ids, context, context_mask),
    std::optional{labels});
}

torch::Tensor distributed_transformer_lm_head_impl::run(
  torch::Tensor tokens, torch::Tensor attention_mask,
  torch::Tensor token_type_ids, torch::Tensor context,
  torch::Tensor context_mask) {
  if (tokens.size(1) > arguments.num_positions)
    throw error{error_code::user_code,
                fmt::format("a sequence of {} tokens, but num_positions is {}",
                            tokens.size(1), arguments.num_positions)};
  auto h = word_embedding(tokens)
           + position_embedding(
             torch::arange(tokens.size(1), tokens.options()));
  if (token_type_embedding)
    h = h
        + token_type_embedding(token_type_ids.defined()
                                 ? token_type_ids
                                 : torch::zeros_like(tokens));
  layer_states states{dropout(h)};
  auto bias = [&](const torch::Tensor& mask, const torch::Tensor& of) {
    return padding_bias(
      mask.defined() ? mask : torch::ones({1, of.size(1)}, tokens.options()));
  };
  if (attention_mask.defined() || arguments.add_cross_attention)
    states.push_back(bias(attention_mask, tokens));
  if (arguments.add_cross_attention) {
    if (!context.defined())
      throw error{error_code::user_code,
                  "add_cross_attention is true, but nothing was given to "
                  "attend to"};
    states.push_back(context);
    states.push_back(bias(context_mask, context));
  }
  h = transformer(std::move(states)).at(0);
  return layernorm ? layernorm(h) : h;
}

} // namespace smp::nn
