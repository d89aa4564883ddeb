#include "runtime/train/models/t5.hpp"

#include "runtime/nn/layer_row.hpp"
#include "runtime/nn/sizes.hpp"
#include "runtime/nn/transformer.hpp"
#include "runtime/sharing/tp_register.hpp"

#include <torch/nn/init.h>

#include <cmath>

namespace smp {

namespace {

int64_t head_size(const model_sizes& x) {
  return x.head_size > 0 ? x.head_size : x.width / x.heads;
}

/// 1 / sqrt(fan in): T5 does not scale attention, its initial weights do.
double std_for(int64_t inputs) {
  return 1 / std::sqrt(static_cast<double>(inputs));
}

submodule<torch::nn::Embedding> make_embedding(int64_t rows, int64_t width,
                                               double std) {
  submodule<torch::nn::Embedding> result{rows, width};
  torch::nn::init::normal_(result->weight, 0, std);
  return result;
}

/// Which bias belongs to a distance (Raffel et al. 2020, section 2.1): one for
/// each small distance, then one for ranges that grow by a constant factor.
/// distance: [T, T] int64, key position - query position
/// @returns [T, T] int64, 0 to relative_buckets - 1
torch::Tensor buckets(torch::Tensor distance, const model_sizes& x,
                      bool decoder) {
  auto n = x.relative_buckets;
  auto result = torch::zeros_like(distance);
  if (decoder) {
    distance = (-distance).clamp_min(0);
  } else {
    n /= 2; // the upper half is for later tokens
    result = distance.gt(0).to(torch::kLong) * n;
    distance = distance.abs();
  }
  const auto exact = n / 2;
  const auto ratio = static_cast<double>(x.relative_distance)
                     / static_cast<double>(exact);
  // In float32 and in this order, so that no distance changes its bucket.
  auto far = (torch::log(distance.to(torch::kFloat) / exact) / std::log(ratio)
              * (n - exact))
               .to(torch::kLong)
             + exact;
  return result
         + torch::where(distance < exact, distance, far.clamp_max(n - 1));
}

/// @returns [T, T] int64: the buckets of all pairs of positions
torch::Tensor buckets_of(int64_t tokens, const model_sizes& x, bool decoder,
                         torch::Device device) {
  auto positions = torch::arange(
    tokens, torch::TensorOptions{torch::kLong}.device(device));
  return buckets(positions.unsqueeze(0) - positions.unsqueeze(1), x, decoder);
}

/// biases: [T, T, H] @returns [1, H, T, T]
torch::Tensor by_heads(const torch::Tensor& biases) {
  return biases.permute({2, 0, 1}).unsqueeze(0);
}

/// What tensor-parallel ranks need to share a block as a whole.
transformer_layer_options options_of_t5_block(const t5_block_impl& x) {
  transformer_layer_options result;
  auto& self = *x.self_attention;
  auto& attention = *self.attention;
  auto& dense = *x.feed_forward->dense;
  auto sizes = attention.sizes;
  auto p = sizes.dropout;
  result.num_attention_heads = sizes.heads;
  result.scale = 1;
  result.takes_mask = true;
  result.returns_arguments = true;
  result.rms_norm = true;
  auto of_self = [](const std::string& name) { return "layer.0." + name; };
  auto inner = of_self("SelfAttention");
  result.attention_norm = {of_self("layer_norm"), sizes.norm_eps};
  result.query_key_value = {{inner + ".q"}, {inner + ".k"}, {inner + ".v"}};
  result.attention_output = {inner + ".o"};
  result.attention_dropout = {inner, p};
  result.attention_output_dropout = {of_self("dropout"), p};
  if (attention.relative_attention_bias)
    result.positions = {
      inner + ".relative_attention_bias",
      [sizes, decoder = attention.decoder](const torch::Tensor& table,
                                           int64_t tokens) {
        return by_heads(torch::embedding(
          table, buckets_of(tokens, sizes, decoder, table.device())));
      }};
  if (x.cross_attention) {
    auto& cross = result.cross_attention.emplace();
    std::string name = "layer.1.EncDecAttention";
    cross.norm = {"layer.1.layer_norm", sizes.norm_eps};
    cross.query = {name + ".q"};
    cross.key = {name + ".k"};
    cross.value = {name + ".v"};
    cross.output = {name + ".o"};
    cross.dropout = {name, p};
    cross.output_dropout = {"layer.1.dropout", p};
  }
  std::string last = x.cross_attention ? "layer.2." : "layer.1.";
  result.output_norm = {last + "layer_norm", sizes.norm_eps};
  result.output_dropout = {last + "dropout", p};
  last += "DenseReluDense.";
  result.intermediate = {last + (dense.gated ? "wi_0" : "wi")};
  if (dense.gated)
    result.gate = {last + "wi_1"};
  result.activation = [gated = dense.gated](const torch::Tensor& y) {
    return gated ? torch::gelu(y, "tanh") : torch::relu(y);
  };
  result.output = {last + "wo"};
  result.inner_dropout = {last + "dropout", p};
  return result;
}

[[maybe_unused]] const bool t5_block_is_registered = tp_register<
  t5_block_impl, smp::nn::distributed_transformer_layer>(options_of_t5_block);

void require_t5(const model_sizes& x) {
  require_transformer(x);
  require_positive("model.decoder_layers", x.decoder_layers);
  if (x.relative_buckets < 4 || x.relative_buckets % 4 != 0)
    throw error{error_code::config,
                fmt::format("model.relative_buckets is {}, must be a multiple "
                            "of 4",
                            x.relative_buckets)};
  if (x.relative_distance <= x.relative_buckets / 2)
    throw error{error_code::config,
                fmt::format("model.relative_distance is {}, must be more than "
                            "half of model.relative_buckets ({})",
                            x.relative_distance, x.relative_buckets)};
}

} // namespace

// -- attention ----------------------------------------------------------------

t5_attention_impl::t5_attention_impl(const model_sizes& x, bool positions,
                                     bool decoder)
  : sizes(x), decoder(decoder) {
  const auto inner = x.heads * head_size(x);
  q = make_linear(x.width, inner, std_for(x.width * head_size(x)), false);
  k = make_linear(x.width, inner, std_for(x.width), false);
  v = make_linear(x.width, inner, std_for(x.width), false);
  o = make_linear(inner, x.width, std_for(inner), false);
  register_module("q", q);
  register_module("k", k);
  register_module("v", v);
  register_module("o", o);
  if (positions) {
    relative_attention_bias = make_embedding(x.relative_buckets, x.heads,
                                             std_for(x.width));
    register_module("relative_attention_bias", relative_attention_bias);
  }
}

std::tuple<torch::Tensor, torch::Tensor>
t5_attention_impl::forward(torch::Tensor x, torch::Tensor context,
                           torch::Tensor bias) {
  if (relative_attention_bias)
    bias = bias
           + by_heads(relative_attention_bias(
             buckets_of(x.size(1), sizes, decoder, x.device())));
  auto y = attend(split_heads(q(x), sizes.heads),
                  split_heads(k(context), sizes.heads),
                  split_heads(v(context), sizes.heads), bias, /*scale=*/1,
                  is_training() ? sizes.dropout : 0.0);
  return {o(merge_heads(y)), bias};
}

// -- the parts of a block -----------------------------------------------------

t5_self_attention_impl::t5_self_attention_impl(const model_sizes& x,
                                               bool positions, bool decoder)
  : attention(x, positions, decoder),
    layer_norm(x.width, x.norm_eps),
    dropout(x.dropout) {
  register_module("SelfAttention", attention);
  register_module("layer_norm", layer_norm);
  register_module("dropout", dropout);
}

std::tuple<torch::Tensor, torch::Tensor>
t5_self_attention_impl::forward(torch::Tensor x, torch::Tensor bias) {
  auto normed = layer_norm(x);
  auto [y, next_bias] = attention(normed, normed, bias);
  return {x + dropout(y), next_bias};
}

t5_cross_attention_impl::t5_cross_attention_impl(const model_sizes& x)
  : attention(x, false, true),
    layer_norm(x.width, x.norm_eps),
    dropout(x.dropout) {
  register_module("EncDecAttention", attention);
  register_module("layer_norm", layer_norm);
  register_module("dropout", dropout);
}

torch::Tensor t5_cross_attention_impl::forward(torch::Tensor x,
                                               torch::Tensor context,
                                               torch::Tensor bias) {
  return x + dropout(std::get<0>(attention(layer_norm(x), context, bias)));
}

t5_dense_impl::t5_dense_impl(const model_sizes& x)
  : gated(x.gated), dropout(x.dropout) {
  const auto inner = inner_width(x);
  wi = make_linear(x.width, inner, std_for(x.width), false);
  register_module(gated ? "wi_0" : "wi", wi);
  if (gated) {
    wi_1 = make_linear(x.width, inner, std_for(x.width), false);
    register_module("wi_1", wi_1);
  }
  wo = make_linear(inner, x.width, std_for(inner), false);
  register_module("wo", wo);
  register_module("dropout", dropout);
}

torch::Tensor t5_dense_impl::forward(torch::Tensor x) {
  auto y = gated ? torch::gelu(wi(x), "tanh") * wi_1(x) : torch::relu(wi(x));
  return wo(dropout(y));
}

t5_feed_forward_impl::t5_feed_forward_impl(const model_sizes& x)
  : dense(x), layer_norm(x.width, x.norm_eps), dropout(x.dropout) {
  register_module("DenseReluDense", dense);
  register_module("layer_norm", layer_norm);
  register_module("dropout", dropout);
}

torch::Tensor t5_feed_forward_impl::forward(torch::Tensor x) {
  return x + dropout(dense(layer_norm(x)));
}

t5_block_impl::t5_block_impl(const model_sizes& x, bool positions, bool decoder)
  : self_attention(x, positions, decoder), feed_forward(x) {
  layer->push_back(self_attention);
  if (decoder) {
    cross_attention = submodule<t5_cross_attention>(x);
    layer->push_back(cross_attention);
  }
  layer->push_back(feed_forward);
  register_module("layer", layer);
}

t5_states t5_block_impl::forward(t5_states x) {
  std::tie(x[0], x[1]) = self_attention(x[0], x[1]);
  if (cross_attention)
    x[0] = cross_attention(x[0], x.at(2), x.at(3));
  x[0] = feed_forward(x[0]);
  return x;
}

// -- a stack ------------------------------------------------------------------

t5_stack_impl::t5_stack_impl(const model_sizes& x,
                             submodule<torch::nn::Embedding> shared,
                             bool decoder)
  : embed_tokens(std::move(shared)),
    final_layer_norm(x.width, x.norm_eps),
    dropout(x.dropout) {
  register_module("embed_tokens", embed_tokens);
  const auto blocks = decoder ? x.decoder_layers : x.layers;
  for (int64_t i = 0; i < blocks; ++i)
    block->push_back(t5_block(x, i == 0, decoder));
  register_module("block", block);
  register_module("final_layer_norm", final_layer_norm);
  register_module("dropout", dropout);
}

torch::Tensor t5_stack_impl::forward(t5_states x) {
  x.at(0) = dropout(embed_tokens(x.at(0)));
  auto y = nn::run_in_row<t5_states>(block, std::move(x));
  return dropout(final_layer_norm(y.at(0)));
}

// -- the whole ----------------------------------------------------------------

t5_impl::t5_impl(const model_sizes& x) : tied(x.tied), shared(nullptr) {
  require_t5(x);
  shared = make_embedding(x.vocabulary, x.width, 1);
  encoder = submodule<t5_stack>(x, shared, false);
  decoder = submodule<t5_stack>(x, shared, true);
  auto weight = x.tied ? shared->weight
                       : normal_tensor({x.vocabulary, x.width}, 1);
  register_module("shared", shared);
  register_module("encoder", encoder);
  register_module("decoder", decoder);
  lm_head.emplace(*this, weight, x.loss_in_head);
}

torch::Tensor t5_impl::hidden(const torch::Tensor& tokens,
                              const torch::Tensor& decoder_tokens,
                              const torch::Tensor& mask) {
  auto bias = padding_bias(mask.defined() ? mask : torch::ones_like(tokens));
  auto context = encoder(t5_states{tokens, bias});
  auto x = decoder(t5_states{
    decoder_tokens, causal_bias(decoder_tokens.size(1), tokens.device()),
    context, bias});
  if (tied) // as in Mesh TensorFlow, where T5 comes from
    x = x * std_for(x.size(2));
  return x;
}

torch::Tensor t5_impl::forward(torch::Tensor tokens,
                               torch::Tensor decoder_tokens,
                               torch::Tensor mask) {
  return lm_head->logits(hidden(tokens, decoder_tokens, mask));
}

torch::Tensor t5_impl::loss(torch::Tensor tokens, torch::Tensor decoder_tokens,
                            torch::Tensor mask, torch::Tensor labels) {
  return lm_head->loss(hidden(tokens, decoder_tokens, mask), labels);
}

torch::Tensor t5_decoder_tokens(const torch::Tensor& labels) {
  auto before = labels.narrow(1, 0, labels.size(1) - 1).clamp_min(0);
  return torch::cat({torch::zeros_like(labels.narrow(1, 0, 1)), before}, 1);
}

} // namespace smp
