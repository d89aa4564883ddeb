#include "runtime/train/models/builtin.hpp"

#include "runtime/train/models/bert.hpp"
#include "runtime/train/models/mlp.hpp"
#include "runtime/train/models/moe.hpp"
#include "runtime/train/models/ncf.hpp"
#include "runtime/train/models/t5.hpp"
#include "runtime/train/trainable.hpp"

#include <torch/nn/functional/loss.h>

#include <fmt/format.h>

namespace smp {

namespace {

/// Catches a data file that belongs to another model.
nn_trainable::inputs_check takes(size_t least, size_t most, const char* what) {
  return [=](size_t tensors) {
    if (tensors < least || tensors > most)
      throw error{error_code::config,
                  fmt::format("the data has {} tensors, but this model takes "
                              "{}",
                              tensors, what)};
  };
}

int64_t number(uint64_t x) {
  return static_cast<int64_t>(x);
}

int64_t number_or_0(const std::optional<uint64_t>& x) {
  return number(x.value_or(0));
}

int64_t vocabulary_of(const train_config& x) {
  return number(x.model.vocabulary.value_or(256));
}

int64_t sequence_length_of(const train_config& x) {
  return number(x.model.sequence_length.value_or(x.data.sequence_length));
}

bool shares_words(const train_config& x) {
  return x.smp.tensor_parallel_degree > 1;
}

// -- one function per model ---------------------------------------------------

std::unique_ptr<trainable> make_gpt(const train_config& x) {
  gpt model{make_gpt_config(x)};
  auto logits = [model](const at::Tensor& tokens) mutable {
    return model(tokens);
  };
  auto loss = [model](const batch& xs) mutable {
    return model->loss(xs[0], xs[1]);
  };
  return std::make_unique<nn_trainable>(
    model.ptr(), loss, takes(2, 2, "tokens and targets"), logits);
}

std::unique_ptr<trainable> make_moe(const train_config& x) {
  moe model{moe_config{make_gpt_config(x), number(x.model.experts)}};
  auto logits = [model](const at::Tensor& tokens) mutable {
    return std::get<0>(model(tokens));
  };
  auto loss = [model, weight = x.model.balance_loss](const batch& xs) mutable {
    auto [entropy, imbalance] = model->loss(xs[0], xs[1]);
    return entropy + weight * imbalance;
  };
  return std::make_unique<nn_trainable>(
    model.ptr(), loss, takes(2, 2, "tokens and targets"), logits);
}

bert_config make_bert_config(const train_config& x, int64_t segments) {
  bert_config result;
  result.vocabulary = vocabulary_of(x);
  result.sequence_length = sequence_length_of(x);
  result.layers = number(x.model.layers);
  result.heads = number(x.model.heads);
  result.width = number(x.model.width);
  result.feed_forward = number_or_0(x.model.feed_forward);
  result.segments = number(x.model.segments.value_or(segments));
  result.norm_eps = x.model.norm_eps.value_or(result.norm_eps);
  result.dropout = x.model.dropout;
  result.tied = x.model.tied.value_or(true);
  result.loss_in_head = shares_words(x);
  return result;
}

template <class Model>
std::unique_ptr<trainable> make_masked(Model model) {
  auto loss = [model](const batch& xs) mutable {
    return model->loss(xs[0], xs.back(), xs.size() > 2 ? xs[1] : at::Tensor{},
                       xs.size() > 3 ? xs[2] : at::Tensor{});
  };
  return std::make_unique<nn_trainable>(
    model.ptr(), loss,
    takes(2, 4, "tokens, mask (if any), segments (if any) and labels"));
}

std::unique_ptr<trainable> make_t5(const train_config& x) {
  t5_config sizes;
  sizes.vocabulary = vocabulary_of(x);
  sizes.layers = number(x.model.layers);
  sizes.decoder_layers = number(
    x.model.decoder_layers.value_or(x.model.layers));
  sizes.heads = number(x.model.heads);
  sizes.width = number(x.model.width);
  sizes.head_size = number_or_0(x.model.head_size);
  sizes.feed_forward = number_or_0(x.model.feed_forward);
  sizes.relative_buckets = number(x.model.relative_buckets);
  sizes.relative_distance = number(x.model.relative_distance);
  sizes.norm_eps = x.model.norm_eps.value_or(sizes.norm_eps);
  sizes.dropout = x.model.dropout;
  sizes.tied = x.model.tied.value_or(true);
  sizes.gated = x.model.gated;
  sizes.loss_in_head = shares_words(x);
  t5 model{sizes};
  auto loss = [model](const batch& xs) mutable {
    auto& labels = xs.back();
    return model->loss(xs[0], xs.size() > 3 ? xs[2] : t5_decoder_tokens(labels),
                       xs.size() > 2 ? xs[1] : at::Tensor{}, labels);
  };
  return std::make_unique<nn_trainable>(
    model.ptr(), loss,
    takes(2, 4, "tokens, mask (if any), decoder tokens (if any) and labels"));
}

std::unique_ptr<trainable> make_ncf(const train_config& x) {
  ncf model{ncf_config{number(x.model.users), number(x.model.items),
                       number(x.model.layers), number(x.model.width),
                       x.model.dropout}};
  auto loss = [model](const batch& xs) mutable {
    return torch::nn::functional::binary_cross_entropy_with_logits(
      model(xs[0], xs[1]), xs[2]);
  };
  return std::make_unique<nn_trainable>(model.ptr(), loss,
                                        takes(3, 3, "users, items and labels"));
}

std::unique_ptr<trainable> make_mlp(const train_config& x) {
  mlp model{mlp_config{number(x.model.inputs), number(x.model.outputs),
                       number(x.model.layers), number(x.model.width)}};
  auto loss = [model](const batch& xs) mutable {
    return torch::nn::functional::cross_entropy(model(xs[0]), xs[1]);
  };
  return std::make_unique<nn_trainable>(model.ptr(), loss,
                                        takes(2, 2, "vectors and classes"));
}

} // namespace

std::unique_ptr<trainable> make_builtin(const train_config& x) {
  auto& type = x.model.type;
  if (type == "gpt")
    return make_gpt(x);
  if (type == "moe")
    return make_moe(x);
  if (type == "bert")
    return make_masked(bert{make_bert_config(x, 2)});
  if (type == "roberta")
    return make_masked(roberta{make_bert_config(x, 1)});
  if (type == "t5")
    return make_t5(x);
  if (type == "ncf")
    return make_ncf(x);
  if (type == "mlp")
    return make_mlp(x);
  throw error{error_code::config, "model.type: unknown '" + type + "'"};
}

gpt_config make_gpt_config(const train_config& x) {
  gpt_config result;
  result.vocabulary = vocabulary_of(x);
  result.sequence_length = sequence_length_of(x);
  result.layers = number(x.model.layers);
  result.heads = number(x.model.heads);
  result.width = number(x.model.width);
  result.feed_forward = number_or_0(x.model.feed_forward);
  result.norm_eps = x.model.norm_eps.value_or(result.norm_eps);
  result.window = x.model.variant == "gpt-3" ? number(x.model.window) : 0;
  result.dropout = x.model.dropout;
  result.tied = x.model.tied.value_or(false);
  result.loss_in_head = shares_words(x);
  return result;
}

} // namespace smp
