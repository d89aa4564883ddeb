#include "runtime/train/memory_need.hpp"

#include <fmt/format.h>

namespace smp {

namespace {

/// Tensors of a parameter's size that the optimizer keeps for it.
uint64_t states_of(const optimizer_config& x) {
  if (x.type == "sgd")
    return x.momentum != 0 ? 1 : 0;
  return x.type == "adagrad" ? 1 : 2;
}

} // namespace

memory_need need_of(const walked_model& model, const train_config& x,
                    const std::function<held_part(uint32_t)>& held) {
  memory_need result;
  // What the optimizer has is float32 in any case.
  auto half = x.smp.bf16_params || x.smp.fp16_params;
  auto kept = states_of(x.optimizer) + (half ? 1 : 0)
              + (x.optimizer.ema_decay ? 1 : 0);
  for (uint32_t i = 0; i < model.tensors.size(); ++i) {
    auto [bytes, is_slice] = held(i);
    result.parameters += bytes;
    if (!model.tensors[i].tensor.requires_grad())
      continue;
    auto holders = replicas_of(x);
    if (is_slice)
      holders /= x.smp.tensor_parallel_degree;
    result.gradients += x.smp.shard_gradients ? bytes / holders : bytes;
    auto states = kept * (half ? 2 * bytes : bytes);
    result.optimizer += x.smp.shard_optimizer_state ? states / holders : states;
  }
  return result;
}

std::string describe(const memory_need& x, const optimizer_config& optimizer) {
  return fmt::format(
    "{} MB for parameters, gradients{}; activations come on "
    "top",
    (x.sum() + 500'000) / 1'000'000,
    states_of(optimizer) > 0 ? " and the state of " + optimizer.type : "");
}

} // namespace smp
