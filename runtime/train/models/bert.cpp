#include "runtime/train/models/bert.hpp"

#include "runtime/nn/layer_row.hpp"
#include "runtime/nn/sizes.hpp"
#include "runtime/nn/transformer.hpp"
#include "runtime/sharing/tp_register.hpp"

#include <torch/nn/functional/activation.h>
#include <torch/nn/init.h>

#include <cmath>
#include <optional>

namespace smp {

namespace {

/// Standard deviation of all weights (BERT).
constexpr double weight_std = 0.02;

/// RoBERTa counts positions from padding + 1 on, and leaves the position
/// embedding of padding untrained, too.
torch::nn::EmbeddingOptions position_options(const model_sizes& x,
                                             bool is_roberta, int64_t padding) {
  if (!is_roberta)
    return {x.sequence_length, x.width};
  return torch::nn::EmbeddingOptions(x.sequence_length + padding + 1, x.width)
    .padding_idx(padding);
}

/// Normal, with 0 in the row of padding.
void init_embedding(torch::nn::EmbeddingImpl& x) {
  torch::nn::init::normal_(x.weight, 0, weight_std);
  if (auto row = x.options.padding_idx()) {
    torch::NoGradGuard no_grad;
    x.weight[*row].zero_();
  }
}

/// What tensor-parallel ranks need to share a layer as a whole.
transformer_layer_options options_of_bert_layer(const bert_layer_impl& x) {
  transformer_layer_options result;
  auto& attention = *x.attention->attention;
  auto& attention_output = *x.attention->output;
  result.num_attention_heads = attention.heads;
  result.pre_layernorm = false;
  result.post_layernorm = true;
  result.takes_mask = true;
  result.returns_arguments = true;
  result.activation = [](const torch::Tensor& y) { return torch::gelu(y); };
  result.attention_norm = {"attention.output.LayerNorm",
                           attention_output.norm->options.eps()};
  result.output_norm = {"output.LayerNorm", x.output->norm->options.eps()};
  result.query_key_value = {
    {"attention.self.query"}, {"attention.self.key"}, {"attention.self.value"}};
  result.attention_output = {"attention.output.dense"};
  result.intermediate = {"intermediate.dense"};
  result.output = {"output.dense"};
  result.attention_dropout = {"attention.self", attention.dropout};
  result.attention_output_dropout = {"attention.output.dropout",
                                     attention_output.dropout->options.p()};
  result.output_dropout = {"output.dropout", x.output->dropout->options.p()};
  return result;
}

[[maybe_unused]] const bool bert_layer_is_registered = tp_register<
  bert_layer_impl, smp::nn::distributed_transformer_layer>(
  options_of_bert_layer);

/// The weight of the last layer: the embedding's, or one of its own.
torch::Tensor decoder_weight(const model_sizes& x,
                             const torch::Tensor& word_embeddings) {
  return x.tied ? word_embeddings
                : normal_tensor({x.vocabulary, x.width}, weight_std);
}

/// @returns the last layer's loss for `x` or, without labels, its logits
torch::Tensor decoded(language_head& decoder, const torch::Tensor& x,
                      const std::optional<torch::Tensor>& labels) {
  return labels ? decoder.loss(x, *labels) : decoder.logits(x);
}

} // namespace

// -- embeddings ---------------------------------------------------------------

bert_embeddings_impl::bert_embeddings_impl(const model_sizes& x,
                                           bool is_roberta)
  : is_roberta(is_roberta),
    padding(is_roberta ? 1 : 0),
    word_embeddings(
      torch::nn::EmbeddingOptions(x.vocabulary, x.width).padding_idx(padding)),
    position_embeddings(position_options(x, is_roberta, padding)),
    token_type_embeddings(x.segments, x.width),
    norm(norm_options(x)),
    dropout(x.dropout) {
  register_module("word_embeddings", word_embeddings);
  register_module("position_embeddings", position_embeddings);
  register_module("token_type_embeddings", token_type_embeddings);
  register_module("LayerNorm", norm);
  register_module("dropout", dropout);
  init_embedding(*word_embeddings);
  init_embedding(*position_embeddings);
  init_embedding(*token_type_embeddings);
}

torch::Tensor bert_embeddings_impl::forward(torch::Tensor tokens,
                                            torch::Tensor segments) {
  auto positions = torch::arange(tokens.size(1), tokens.options());
  if (is_roberta) {
    auto real = tokens.ne(padding).to(torch::kLong);
    positions = real.cumsum(1) * real + padding;
  }
  auto x = word_embeddings(tokens) + token_type_embeddings(segments)
           + position_embeddings(positions);
  return dropout(norm(x));
}

// -- a layer ------------------------------------------------------------------

bert_self_attention_impl::bert_self_attention_impl(const model_sizes& x)
  : heads(x.heads),
    dropout(x.dropout),
    query(make_linear(x.width, x.width, weight_std)),
    key(make_linear(x.width, x.width, weight_std)),
    value(make_linear(x.width, x.width, weight_std)) {
  register_module("query", query);
  register_module("key", key);
  register_module("value", value);
}

torch::Tensor bert_self_attention_impl::forward(torch::Tensor x,
                                                torch::Tensor bias) {
  auto q = split_heads(query(x), heads);
  auto k = split_heads(key(x), heads);
  auto v = split_heads(value(x), heads);
  const auto scale = 1 / std::sqrt(static_cast<double>(q.size(3)));
  return merge_heads(
    attend(q, k, v, bias, scale, is_training() ? dropout : 0.0));
}

bert_output_impl::bert_output_impl(const model_sizes& x, int64_t inner)
  : dense(make_linear(inner, x.width, weight_std)),
    norm(norm_options(x)),
    dropout(x.dropout) {
  register_module("dense", dense);
  register_module("LayerNorm", norm);
  register_module("dropout", dropout);
}

torch::Tensor bert_output_impl::forward(torch::Tensor x,
                                        torch::Tensor residual) {
  return norm(dropout(dense(x)) + residual);
}

bert_attention_impl::bert_attention_impl(const model_sizes& x)
  : attention(x), output(x, x.width) {
  register_module("self", attention);
  register_module("output", output);
}

torch::Tensor bert_attention_impl::forward(torch::Tensor x,
                                           torch::Tensor bias) {
  return output(attention(x, bias), x);
}

bert_intermediate_impl::bert_intermediate_impl(const model_sizes& x)
  : dense(make_linear(x.width, inner_width(x), weight_std)) {
  register_module("dense", dense);
}

torch::Tensor bert_intermediate_impl::forward(torch::Tensor x) {
  return torch::nn::functional::gelu(dense(x));
}

bert_layer_impl::bert_layer_impl(const model_sizes& x)
  : attention(x), intermediate(x), output(x, inner_width(x)) {
  register_module("attention", attention);
  register_module("intermediate", intermediate);
  register_module("output", output);
}

std::tuple<torch::Tensor, torch::Tensor>
bert_layer_impl::forward(std::tuple<torch::Tensor, torch::Tensor> x) {
  auto& [states, bias] = x;
  auto y = attention(states, bias);
  return {output(intermediate(y), y), bias};
}

// -- body ---------------------------------------------------------------------

bert_encoder_impl::bert_encoder_impl(const model_sizes& x) {
  for (int64_t i = 0; i < x.layers; ++i)
    layer->push_back(bert_layer(x));
  register_module("layer", layer);
}

torch::Tensor bert_encoder_impl::forward(torch::Tensor x, torch::Tensor bias) {
  using states = std::tuple<torch::Tensor, torch::Tensor>;
  return std::get<0>(nn::run_in_row<states>(layer, states{x, bias}));
}

bert_body_impl::bert_body_impl(const model_sizes& x, bool is_roberta)
  : embeddings(x, is_roberta), encoder(x) {
  register_module("embeddings", embeddings);
  register_module("encoder", encoder);
}

torch::Tensor bert_body_impl::forward(torch::Tensor tokens, torch::Tensor mask,
                                      torch::Tensor segments) {
  return encoder(embeddings(tokens, segments), padding_bias(mask));
}

// -- BERT ---------------------------------------------------------------------

bert_transform_impl::bert_transform_impl(const model_sizes& x)
  : dense(make_linear(x.width, x.width, weight_std)), norm(norm_options(x)) {
  register_module("dense", dense);
  register_module("LayerNorm", norm);
}

torch::Tensor bert_transform_impl::forward(torch::Tensor x) {
  return norm(torch::nn::functional::gelu(dense(x)));
}

bert_predictions_impl::bert_predictions_impl(const model_sizes& x,
                                             torch::Tensor word_embeddings)
  : bias(register_parameter("bias", torch::zeros({x.vocabulary}))),
    transform(x) {
  register_module("transform", transform);
  decoder.emplace(*this, decoder_weight(x, word_embeddings), x.loss_in_head,
                  "decoder", bias);
}

torch::Tensor
bert_predictions_impl::forward(const torch::Tensor& x,
                               const std::optional<torch::Tensor>& labels) {
  return decoded(*decoder, transform(x), labels);
}

bert_head_impl::bert_head_impl(const model_sizes& x,
                               torch::Tensor word_embeddings)
  : predictions(x, word_embeddings) {
  register_module("predictions", predictions);
}

torch::Tensor
bert_head_impl::forward(const torch::Tensor& x,
                        const std::optional<torch::Tensor>& labels) {
  return predictions(x, labels);
}

// -- RoBERTa ------------------------------------------------------------------

roberta_head_impl::roberta_head_impl(const model_sizes& x,
                                     torch::Tensor word_embeddings)
  : bias(register_parameter("bias", torch::zeros({x.vocabulary}))),
    dense(make_linear(x.width, x.width, weight_std)),
    layer_norm(norm_options(x)) {
  register_module("dense", dense);
  register_module("layer_norm", layer_norm);
  decoder.emplace(*this, decoder_weight(x, word_embeddings), x.loss_in_head,
                  "decoder", bias);
}

torch::Tensor
roberta_head_impl::forward(const torch::Tensor& x,
                           const std::optional<torch::Tensor>& labels) {
  return decoded(*decoder, layer_norm(torch::nn::functional::gelu(dense(x))),
                 labels);
}

// -- the whole ----------------------------------------------------------------

template <class Head>
masked_model_impl<Head>::masked_model_impl(const model_sizes& x,
                                           bool is_roberta,
                                           const char* body_name,
                                           const char* head_name)
  : loss_in_head(x.loss_in_head) {
  require_transformer(x);
  require_positive("model.segments", x.segments);
  body = submodule<bert_body>(x, is_roberta);
  head = submodule<Head>(x, body->embeddings->word_embeddings->weight);
  register_module(body_name, body);
  register_module(head_name, head);
}

template <class Head>
torch::Tensor masked_model_impl<Head>::run_body(const torch::Tensor& tokens,
                                                torch::Tensor mask,
                                                torch::Tensor segments) {
  if (!mask.defined())
    mask = torch::ones_like(tokens);
  if (!segments.defined())
    segments = torch::zeros_like(tokens);
  return body(tokens, mask, segments);
}

template <class Head>
torch::Tensor masked_model_impl<Head>::forward(torch::Tensor tokens,
                                               torch::Tensor mask,
                                               torch::Tensor segments) {
  return head(run_body(tokens, mask, segments), std::nullopt);
}

template <class Head>
torch::Tensor
masked_model_impl<Head>::loss(torch::Tensor tokens, torch::Tensor labels,
                              torch::Tensor mask, torch::Tensor segments) {
  auto x = run_body(tokens, mask, segments);
  return loss_in_head ? head(x, std::optional{labels})
                      : token_loss(head(x, std::nullopt), labels);
}

template struct masked_model_impl<bert_head>;
template struct masked_model_impl<roberta_head>;

} // namespace smp
