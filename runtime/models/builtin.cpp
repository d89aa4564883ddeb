#include "runtime/models/builtin.hpp"

#include "runtime/trainable.hpp"

#include <torch/nn/functional/loss.h>

#include <fmt/format.h>

namespace smp {

namespace {

namespace nn = torch::nn;

/// A data file that belongs to another model is caught here.
void require_tensors(const batch& x, size_t n, const char* model,
                     const char* meaning) {
  if (x.size() != n)
    throw error{error_code::config,
                fmt::format("model.type = \"{}\" takes {} tensors ({}), but "
                            "the data has {}",
                            model, n, meaning, x.size())};
}

/// batch: {tokens, targets}, both [B, T] int64
std::unique_ptr<trainable> make_gpt(const train_config& x) {
  gpt model{make_gpt_config(x)};
  auto logits = [model](const at::Tensor& tokens) mutable {
    return model(tokens);
  };
  auto loss = [logits](const batch& xs) mutable {
    require_tensors(xs, 2, "gpt", "tokens, targets");
    return nn::functional::cross_entropy(logits(xs[0]).flatten(0, 1),
                                         xs[1].flatten());
  };
  return std::make_unique<nn_trainable>(model.ptr(), loss, logits);
}

} // namespace

std::unique_ptr<trainable> make_builtin(const train_config& x) {
  if (x.model.type == "gpt")
    return make_gpt(x);
  throw error{error_code::config, "model.type: unknown '" + x.model.type + "'"};
}

gpt_config make_gpt_config(const train_config& x) {
  gpt_config result;
  result.vocabulary = static_cast<int64_t>(x.model.vocabulary.value_or(256));
  result.sequence_length = static_cast<int64_t>(
    x.model.sequence_length.value_or(x.data.sequence_length));
  result.layers = static_cast<int64_t>(x.model.layers);
  result.heads = static_cast<int64_t>(x.model.heads);
  result.width = static_cast<int64_t>(x.model.width);
  result.dropout = x.model.dropout;
  result.tied = x.model.tied;
  return result;
}

} // namespace smp
