#include "runtime/train/memory_need.hpp"

#include "runtime/base/out_of_memory.hpp"
#include "runtime/model/module_walk.hpp"

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <utility>

namespace smp {

namespace {

constexpr uint64_t mib = 1 << 20;

/// Tensors of a parameter's size that the optimizer keeps for it.
uint64_t states_of(const optimizer_config& x) {
  if (x.type == "sgd")
    return x.momentum != 0 ? 1 : 0;
  return x.type == "adagrad" ? 1 : 2;
}

/// Tensors that all replicas hold or may divide.
struct common_tensors {
  uint64_t bytes = 0;
  uint64_t own = 0;     // of the rows that one replica updates
  uint64_t largest = 0; // gradient
};

/// With sharded gradients one bucket fills while another is in flight, if all
/// replicas are equally fast; without overlap, all gradients wait for the end
/// of the step. In addition, a copy of the updated rows lives until the next
/// update.
uint64_t buckets_of(const common_tensors& x, const session_config& config) {
  auto bucket = std::min(std::max(config.bucket_cap_mb * mib, x.largest),
                         x.bytes);
  auto gradients = config.overlapping_allreduce ? 2 * bucket : x.bytes;
  return (config.shard_gradients ? gradients : 0)
         + (config.shard_optimizer_state ? x.own : 0);
}

} // namespace

memory_need need_of(const walked_model& model, const train_config& x,
                    const std::function<held_part(uint32_t)>& held,
                    bool on_device) {
  memory_need result;
  common_tensors common;
  uint64_t updated = 0; // bytes of what this rank updates
  // The optimizer's tensors are float32 in any case.
  auto half = x.smp.bf16_params || x.smp.fp16_params;
  auto kept = states_of(x.optimizer) + (half ? 1 : 0)
              + (x.optimizer.ema_decay ? 1 : 0);
  for (uint32_t i = 0; i < model.tensors.size(); ++i) {
    auto [bytes, is_slice] = held(i);
    result.parameters += bytes;
    if (!model.tensors[i].tensor.requires_grad())
      continue;
    auto holders = dp_size_of(x);
    if (is_slice)
      holders /= x.smp.tensor_parallel_degree;
    result.gradients += x.smp.shard_gradients ? bytes / holders : bytes;
    auto own = x.smp.shard_optimizer_state ? bytes / holders : bytes;
    updated += own;
    result.optimizer += kept * (half ? 2 * own : own);
    result.updates += half ? 2 * own : 0;
    if (holders == 1)
      continue;
    common.bytes += bytes;
    common.own += bytes / holders;
    common.largest = std::max(common.largest, bytes);
  }
  result.buckets = buckets_of(common, x.smp);
  if (on_device && !x.smp.offload_optimizer)
    result.could_leave = result.optimizer + result.updates;
  if (on_device && x.smp.offload_optimizer)
    // And a copy of each parameter and gradient.
    result.on_host = std::exchange(result.optimizer, 0)
                     + std::exchange(result.updates, 0) + 2 * updated;
  if (auto& path = x.smp.device_path; path.force)
    result.arenas = (path.send_arena + path.receive_arena) * mib;
  return result;
}

namespace {

std::string describe(const memory_need& x, const optimizer_config& optimizer) {
  std::vector<std::string> parts{"parameters", "gradients"};
  if (x.buckets > 0)
    parts.push_back("buckets");
  if (x.updates > 0)
    parts.push_back("updates");
  if (x.arenas > 0)
    parts.push_back("arenas");
  if (states_of(optimizer) > 0 && x.on_host == 0)
    parts.push_back("the state of " + optimizer.type);
  auto last = parts.back();
  parts.pop_back();
  return fmt::format("{} MB for {} and {}; activations come on top",
                     (x.sum() + 500'000) / 1'000'000, fmt::join(parts, ", "),
                     last);
}

} // namespace

void explain_need(failure& why, const memory_need& x,
                  const optimizer_config& optimizer) {
  auto of_host = why.text.find("DefaultCPUAllocator") != why.text.npos;
  why.text += fmt::format("; this rank needs {} (docs/large_models.md)",
                          describe(x, optimizer));
  if (x.could_leave > 0 && !of_host)
    why.text += fmt::format(
      "; smp.offload_optimizer = true takes {} MB of it to host memory",
      (x.could_leave + 500'000) / 1'000'000);
}

// -- table --------------------------------------------------------------------

namespace {

struct need_column {
  std::string title;
  int width = 0;
  uint64_t memory_need::*bytes = nullptr;
};

std::vector<need_column> columns_of(const std::vector<memory_need>& xs,
                                    const optimizer_config& optimizer) {
  std::vector<need_column> result{
    {"parameters", 12, &memory_need::parameters},
    {"gradients", 11, &memory_need::gradients},
    {"state of " + optimizer.type, 18, &memory_need::optimizer}};
  for (auto& x : {need_column{"buckets", 9, &memory_need::buckets},
                  need_column{"updates", 9, &memory_need::updates},
                  need_column{"arenas", 8, &memory_need::arenas}})
    if (std::ranges::any_of(xs, [&](auto& y) { return y.*x.bytes > 0; }))
      result.push_back(x);
  return result;
}

std::string mb_text(uint64_t bytes) {
  return fmt::format("{:.2f}", 1e-6 * static_cast<double>(bytes));
}

} // namespace

std::string
needs_table(const std::vector<memory_need>& xs,
            const optimizer_config& optimizer,
            const std::vector<std::optional<uint64_t>>& activations) {
  auto columns = columns_of(xs, optimizer);
  auto result = fmt::format("{:<12}", "memory, MB");
  for (auto& c : columns)
    result += fmt::format("{:>{}}", c.title, c.width);
  if (!activations.empty())
    result += fmt::format("{:>13}", "activations");
  auto is_on_host = [](auto& x) { return x.on_host > 0; };
  auto on_host = std::ranges::any_of(xs, is_on_host);
  result += fmt::format("{:>10}{}\n", "sum", on_host ? "   on host" : "");
  for (size_t i = 0; i < xs.size(); ++i) {
    auto sum = xs[i].sum();
    result += fmt::format("  {:<10}", fmt::format("device {}", i));
    for (auto& c : columns)
      result += fmt::format("{:>{}}", mb_text(xs[i].*c.bytes), c.width);
    if (!activations.empty()) {
      auto& kept = activations.at(i);
      result += fmt::format("{:>13}", kept ? mb_text(*kept) : "?");
      sum += kept.value_or(0);
    }
    result += fmt::format("{:>10}", mb_text(sum));
    if (on_host)
      result += fmt::format("{:>10}", mb_text(xs[i].on_host));
    result += '\n';
  }
  return result;
}

std::optional<failure> lack_of_memory() {
  failure found;
  try {
    throw;
  } catch (const error& err) {
    found = err.cause();
  } catch (const c10::Error& err) {
    found.code = error_code::user_code;
    found.text = err.what_without_backtrace();
  } catch (...) {
    return std::nullopt;
  }
  return is_out_of_memory(found.text) ? std::optional{found} : std::nullopt;
}

} // namespace smp
