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

torch::nn::LayerNormOptions norm_options(const bert_config& x) {
  return torch::nn::LayerNormOptions({x.width}).eps(x.norm_eps);
}

int64_t inner_width(const bert_config& x) {
  return x.feed_forward > 0 ? x.feed_forward : 4 * x.width;
}

int64_t position_rows(const bert_config& x) {
  return x.sequence_length + (x.positions_skip_padding ? x.padding + 1 : 0);
}

/// RoBERTa also leaves the position embedding of padding untrained.
torch::nn::EmbeddingOptions position_options(const bert_config& x) {
  torch::nn::EmbeddingOptions result{position_rows(x), x.width};
  return x.positions_skip_padding ? result.padding_idx(x.padding) : result;
}

/// Normal, with 0 in the row of padding.
void init_embedding(torch::nn::EmbeddingImpl& x) {
  torch::nn::init::normal_(x.weight, 0, weight_std);
  if (auto row = x.options.padding_idx()) {
    torch::NoGradGuard no_grad;
    x.weight[*row].zero_();
  }
}

submodule<torch::nn::Linear> make_linear(int64_t in, int64_t out) {
  submodule<torch::nn::Linear> result{in, out};
  init_linear(*result, weight_std);
  return result;
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
torch::Tensor decoder_weight(const bert_config& x,
                             const torch::Tensor& word_embeddings) {
  return x.tied ? word_embeddings
                : normal_tensor({x.vocabulary, x.width}, weight_std);
}

/// @returns the loss of `labels`, from the head or from its logits
/// @param x the output of the body
template <class Head>
torch::Tensor loss_of(Head& head, bool in_head, const torch::Tensor& x,
                      const torch::Tensor& labels) {
  return in_head ? head(x, std::optional{labels})
                 : token_loss(head(x, std::nullopt), labels);
}

/// @returns the last layer's loss for `x` or, without labels, its logits
torch::Tensor decoded(language_head& decoder, const torch::Tensor& x,
                      const std::optional<torch::Tensor>& labels) {
  return labels ? decoder.loss(x, *labels) : decoder.logits(x);
}

/// Fills in optional tensors.
template <class Body>
torch::Tensor run_body(Body& body, const torch::Tensor& tokens,
                       torch::Tensor mask, torch::Tensor segments) {
  if (!mask.defined())
    mask = torch::ones_like(tokens);
  if (!segments.defined())
    segments = torch::zeros_like(tokens);
  return body(tokens, mask, segments);
}

} // namespace

void validate(const bert_config& x) {
  require_positive("model.vocabulary", x.vocabulary);
  require_positive("model.sequence_length", x.sequence_length);
  require_positive("model.layers", x.layers);
  require_positive("model.segments", x.segments);
  require_heads(x.width, x.heads);
  require_probability("model.dropout", x.dropout);
}

// -- embeddings ---------------------------------------------------------------

bert_embeddings_impl::bert_embeddings_impl(const bert_config& x)
  : padding(x.padding),
    positions_skip_padding(x.positions_skip_padding),
    word_embeddings(torch::nn::EmbeddingOptions(x.vocabulary, x.width)
                      .padding_idx(x.padding)),
    position_embeddings(position_options(x)),
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
  if (positions_skip_padding) {
    auto real = tokens.ne(padding).to(torch::kLong);
    positions = real.cumsum(1) * real + padding;
  }
  auto x = word_embeddings(tokens) + token_type_embeddings(segments)
           + position_embeddings(positions);
  return dropout(norm(x));
}

// -- a layer ------------------------------------------------------------------

bert_self_attention_impl::bert_self_attention_impl(const bert_config& x)
  : heads(x.heads),
    dropout(x.dropout),
    query(make_linear(x.width, x.width)),
    key(make_linear(x.width, x.width)),
    value(make_linear(x.width, x.width)) {
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

bert_output_impl::bert_output_impl(const bert_config& x, int64_t inner)
  : dense(make_linear(inner, x.width)),
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

bert_attention_impl::bert_attention_impl(const bert_config& x)
  : attention(x), output(x, x.width) {
  register_module("self", attention);
  register_module("output", output);
}

torch::Tensor bert_attention_impl::forward(torch::Tensor x,
                                           torch::Tensor bias) {
  return output(attention(x, bias), x);
}

bert_intermediate_impl::bert_intermediate_impl(const bert_config& x)
  : dense(make_linear(x.width, inner_width(x))) {
  register_module("dense", dense);
}

torch::Tensor bert_intermediate_impl::forward(torch::Tensor x) {
  return torch::nn::functional::gelu(dense(x));
}

bert_layer_impl::bert_layer_impl(const bert_config& x)
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

bert_encoder_impl::bert_encoder_impl(const bert_config& x) {
  for (int64_t i = 0; i < x.layers; ++i)
    layer->push_back(bert_layer(x));
  register_module("layer", layer);
}

torch::Tensor bert_encoder_impl::forward(torch::Tensor x, torch::Tensor bias) {
  using states = std::tuple<torch::Tensor, torch::Tensor>;
  return std::get<0>(nn::run_in_row<states>(layer, states{x, bias}));
}

bert_body_impl::bert_body_impl(const bert_config& x)
  : embeddings(x), encoder(x) {
  register_module("embeddings", embeddings);
  register_module("encoder", encoder);
}

torch::Tensor bert_body_impl::forward(torch::Tensor tokens, torch::Tensor mask,
                                      torch::Tensor segments) {
  return encoder(embeddings(tokens, segments), padding_bias(mask));
}

// -- BERT ---------------------------------------------------------------------

bert_transform_impl::bert_transform_impl(const bert_config& x)
  : dense(make_linear(x.width, x.width)), norm(norm_options(x)) {
  register_module("dense", dense);
  register_module("LayerNorm", norm);
}

torch::Tensor bert_transform_impl::forward(torch::Tensor x) {
  return norm(torch::nn::functional::gelu(dense(x)));
}

bert_predictions_impl::bert_predictions_impl(const bert_config& x,
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

bert_head_impl::bert_head_impl(const bert_config& x,
                               torch::Tensor word_embeddings)
  : predictions(x, word_embeddings) {
  register_module("predictions", predictions);
}

torch::Tensor
bert_head_impl::forward(const torch::Tensor& x,
                        const std::optional<torch::Tensor>& labels) {
  return predictions(x, labels);
}

bert_impl::bert_impl(const bert_config& x) : loss_in_head(x.loss_in_head) {
  validate(x);
  bert = submodule<bert_body>(x);
  cls = submodule<bert_head>(x, bert->embeddings->word_embeddings->weight);
  register_module("bert", bert);
  register_module("cls", cls);
}

torch::Tensor bert_impl::forward(torch::Tensor tokens, torch::Tensor mask,
                                 torch::Tensor segments) {
  return cls(run_body(bert, tokens, mask, segments), std::nullopt);
}

torch::Tensor bert_impl::loss(torch::Tensor tokens, torch::Tensor labels,
                              torch::Tensor mask, torch::Tensor segments) {
  return loss_of(cls, loss_in_head, run_body(bert, tokens, mask, segments),
                 labels);
}

// -- RoBERTa ------------------------------------------------------------------

roberta_head_impl::roberta_head_impl(const bert_config& x,
                                     torch::Tensor word_embeddings)
  : bias(register_parameter("bias", torch::zeros({x.vocabulary}))),
    dense(make_linear(x.width, x.width)),
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

roberta_impl::roberta_impl(bert_config x) : loss_in_head(x.loss_in_head) {
  x.padding = 1;
  x.positions_skip_padding = true;
  validate(x);
  roberta = submodule<bert_body>(x);
  lm_head = submodule<roberta_head>(
    x, roberta->embeddings->word_embeddings->weight);
  register_module("roberta", roberta);
  register_module("lm_head", lm_head);
}

torch::Tensor roberta_impl::forward(torch::Tensor tokens, torch::Tensor mask,
                                    torch::Tensor segments) {
  return lm_head(run_body(roberta, tokens, mask, segments), std::nullopt);
}

torch::Tensor roberta_impl::loss(torch::Tensor tokens, torch::Tensor labels,
                                 torch::Tensor mask, torch::Tensor segments) {
  return loss_of(lm_head, loss_in_head,
                 run_body(roberta, tokens, mask, segments), labels);
}

} // namespace smp
