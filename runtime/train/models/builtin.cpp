#include "runtime/train/models/builtin.hpp"

#include "runtime/train/models/bert.hpp"
#include "runtime/train/models/gpt.hpp"
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

// -- one function per model ---------------------------------------------------

std::unique_ptr<trainable> make_gpt(const model_sizes& x) {
  gpt model{x};
  auto logits = [model](const at::Tensor& tokens) mutable {
    return model(tokens);
  };
  auto loss = [model](const batch& xs) mutable {
    return model->loss(xs[0], xs[1]);
  };
  return std::make_unique<nn_trainable>(
    model.ptr(), loss, takes(2, 2, "tokens and targets"), logits);
}

std::unique_ptr<trainable> make_moe(const model_sizes& x, double balance_loss) {
  moe model{x};
  auto logits = [model](const at::Tensor& tokens) mutable {
    return std::get<0>(model(tokens));
  };
  auto loss = [model, weight = balance_loss](const batch& xs) mutable {
    auto [entropy, imbalance] = model->loss(xs[0], xs[1]);
    return entropy + weight * imbalance;
  };
  return std::make_unique<nn_trainable>(
    model.ptr(), loss, takes(2, 2, "tokens and targets"), logits);
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

std::unique_ptr<trainable> make_t5(const model_sizes& x) {
  t5 model{x};
  auto loss = [model](const batch& xs) mutable {
    auto& labels = xs.back();
    return model->loss(xs[0], xs.size() > 3 ? xs[2] : t5_decoder_tokens(labels),
                       xs.size() > 2 ? xs[1] : at::Tensor{}, labels);
  };
  return std::make_unique<nn_trainable>(
    model.ptr(), loss,
    takes(2, 4, "tokens, mask (if any), decoder tokens (if any) and labels"));
}

std::unique_ptr<trainable> make_ncf(const model_sizes& x) {
  ncf model{x};
  auto loss = [model](const batch& xs) mutable {
    return torch::nn::functional::binary_cross_entropy_with_logits(
      model(xs[0], xs[1]), xs[2]);
  };
  return std::make_unique<nn_trainable>(model.ptr(), loss,
                                        takes(3, 3, "users, items and labels"));
}

std::unique_ptr<trainable> make_mlp(const model_sizes& x) {
  mlp model{x};
  auto loss = [model](const batch& xs) mutable {
    return torch::nn::functional::cross_entropy(model(xs[0]), xs[1]);
  };
  return std::make_unique<nn_trainable>(model.ptr(), loss,
                                        takes(2, 2, "vectors and classes"));
}

} // namespace

std::unique_ptr<trainable> make_builtin(const train_config& config) {
  const auto& type = config.model.type;
  const auto x = sizes_of(config);
  if (type == "gpt")
    return make_gpt(x);
  if (type == "moe")
    return make_moe(x, config.model.balance_loss);
  if (type == "bert")
    return make_masked(bert{x});
  if (type == "roberta")
    return make_masked(roberta{x});
  if (type == "t5")
    return make_t5(x);
  if (type == "ncf")
    return make_ncf(x);
  if (type == "mlp")
    return make_mlp(x);
  throw error{error_code::config, "model.type: unknown '" + type + "'"};
}

model_sizes sizes_of(const train_config& config) {
  auto number = [](uint64_t x) { return static_cast<int64_t>(x); };
  const auto x = effective(config).model;
  return {.vocabulary = number(*x.vocabulary),
          .sequence_length = number(*x.sequence_length),
          .layers = number(x.layers),
          .decoder_layers = number(*x.decoder_layers),
          .heads = number(x.heads),
          .width = number(x.width),
          .head_size = number(config.model.head_size.value_or(0)),
          .feed_forward = number(*x.feed_forward),
          .segments = number(*x.segments),
          .norm_eps = *x.norm_eps,
          .window = x.variant == "gpt-3" ? number(x.window) : 0,
          .relative_buckets = number(x.relative_buckets),
          .relative_distance = number(x.relative_distance),
          .gated = x.gated,
          .experts = number(x.experts),
          .users = number(x.users),
          .items = number(x.items),
          .inputs = number(x.inputs),
          .outputs = number(x.outputs),
          .dropout = x.dropout,
          .tied = *x.tied,
          .loss_in_head = config.smp.tensor_parallel_degree > 1};
}

} // namespace smp
