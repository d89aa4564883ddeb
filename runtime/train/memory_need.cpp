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

uint64_t memory_need(const walked_model& model, const train_config& x,
                     const std::function<bool(uint32_t)>& owned) {
  uint64_t trained = 0;
  uint64_t others = 0;
  // What the optimizer has is float32 in any case.
  uint64_t of_states = 0;
  auto half = x.smp.bf16_params || x.smp.fp16_params;
  auto states = states_of(x.optimizer) + (half ? 1 : 0)
                + (x.optimizer.ema_decay ? 1 : 0);
  for (uint32_t i = 0; i < model.tensors.size(); ++i) {
    if (!owned(i))
      continue;
    auto& t = model.tensors[i].tensor;
    auto bytes = static_cast<uint64_t>(t.numel()) * t.element_size();
    (t.requires_grad() ? trained : others) += bytes;
    if (t.requires_grad())
      of_states += states * (half ? 2 * bytes : bytes);
  }
  auto shards = x.smp.shard_optimizer_state ? replicas_of(x) : 1;
  auto gradients = x.smp.shard_gradients ? trained / shards : trained;
  return others + trained + gradients + of_states / shards;
}

std::string describe_memory_need(uint64_t bytes, const optimizer_config& x) {
  return fmt::format(
    "{} MB for parameters, gradients{}; activations come on "
    "top",
    (bytes + 500'000) / 1'000'000,
    states_of(x) > 0 ? " and the state of " + x.type : "");
}

} // namespace smp
