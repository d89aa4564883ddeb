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
                    const std::function<uint64_t(uint32_t)>& bytes_of) {
  memory_need result;
  uint64_t trained = 0;
  for (uint32_t i = 0; i < model.tensors.size(); ++i) {
    auto bytes = bytes_of(i);
    result.parameters += bytes;
    if (model.tensors[i].tensor.requires_grad())
      trained += bytes;
  }
  auto replicas = replicas_of(x);
  result.gradients = x.smp.shard_gradients ? trained / replicas : trained;
  // What the optimizer has is float32 in any case.
  auto half = x.smp.bf16_params || x.smp.fp16_params;
  auto kept = states_of(x.optimizer) + (half ? 1 : 0)
              + (x.optimizer.ema_decay ? 1 : 0);
  result.optimizer = kept * (half ? 2 * trained : trained);
  if (x.smp.shard_optimizer_state)
    result.optimizer /= replicas;
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
