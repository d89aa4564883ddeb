#include "tests/simulated/backend/fallback.hpp"

#include "tests/simulated/backend/copies.hpp"
#include "tests/simulated/backend/kernels.hpp"
#include "tests/simulated/backend/operators.hpp"

#include <c10/core/DeviceGuard.h>

#include <memory>
#include <mutex>
#include <string>
#include <utility>

namespace smp::sim {

namespace {

using c10::IValue;

struct counted_operators {
  std::mutex mutex;
  operator_counts counts;

  template <class F>
  void change(const F& f) {
    std::lock_guard guard{mutex};
    f(counts);
  }
};

counted_operators& counted() {
  static auto* const only = new counted_operators;
  return *only;
}

/// @param stack the arguments, then the results
void run_on_cpu(const c10::OperatorHandle& op, value_stack& stack) {
  // Torch returns references to several outputs after it has dropped them from
  // the stack: somebody must keep them.
  auto kept = stack;
  op.redispatchBoxed(c10::DispatchKeySet{c10::DispatchKey::CPU}, &stack);
}

value_stack queue_call(const operator_call& call, const result_shapes& shapes) {
  auto results = std::make_shared<call_results>(call.make_results(shapes));
  auto accesses = call.accesses();
  accesses.insert(accesses.end(), results->accesses.begin(),
                  results->accesses.end());
  // A closure holds no device memory alive.
  auto values = std::exchange(results->values, {});
  queue(
    call.on(), call.name(),
    [op = call.op(), stack = call.cpu_arguments(), results]() mutable {
      run_on_cpu(op, stack);
      results->fill(tensors_of(stack), op.schema().name().c_str());
    },
    accesses);
  return values;
}

/// What the CPU kernel has returned, on the device.
value_stack moved_to_device(const operator_call& call,
                            const value_stack& made) {
  value_stack result;
  for (const auto& x : made)
    result.push_back(map_tensors(x, [&](const at::Tensor& t) {
      auto moved = make_tensor(call.on(), shape_of(t));
      copy_from(t, moved, false);
      return moved;
    }));
  return result;
}

value_stack queued_results(const operator_call& call, const value_stack& made,
                           const result_shapes& shapes) {
  auto results = std::make_shared<call_results>(call.make_results(shapes));
  auto values = std::exchange(results->values, {});
  queue(
    call.on(), call.name(),
    [results, made = tensors_of(made), name = call.name()] {
      results->fill(made, name);
    },
    results->accesses);
  return values;
}

/// Runs now.
/// @param key where to remember the shapes
value_stack wait_call(const operator_call& call, const std::string* key) {
  auto made = std::make_shared<value_stack>(call.cpu_arguments());
  queue(
    call.on(), call.name(), [op = call.op(), made] { run_on_cpu(op, *made); },
    call.accesses());
  wait_current(call.on(), call.name());
  counted().change([&](operator_counts& counts) {
    ++counts.waited;
    ++counts.waited_for[toString(call.op().operator_name())];
  });
  call.copy_grown();
  if (!returns_only_tensors(call.schema()))
    return moved_to_device(call, *made);
  auto shapes = shapes_of(*made);
  if (key != nullptr)
    remember_shapes(*key, shapes);
  return queued_results(call, *made, shapes);
}

bool always_waits(const c10::OperatorHandle& op) {
  return op.hasTag(at::Tag::dynamic_output_shape)
         || op.hasTag(at::Tag::data_dependent_output)
         || !returns_only_tensors(op.schema());
}

value_stack run_with_memory(const operator_call& call,
                            c10::ArrayRef<IValue> arguments) {
  auto key = signature(call.op(), arguments);
  auto known = remembered_shapes(key);
  if (!known)
    return wait_call(call, call.grows() ? nullptr : &key);
  counted().change([](operator_counts& counts) { ++counts.by_memory; });
  return queue_call(call, *known);
}

value_stack run_call(const c10::OperatorHandle& op,
                     c10::ArrayRef<IValue> arguments) {
  operator_call call{op, arguments};
  c10::DeviceGuard guard{call.on().device()};
  if (always_waits(op))
    return wait_call(call, nullptr);
  auto shapes = call.ask_meta();
  if (!shapes)
    return run_with_memory(call, arguments);
  counted().change([](operator_counts& counts) { ++counts.by_meta; });
  return queue_call(call, *shapes);
}

} // namespace

void fallback(const c10::OperatorHandle& op, value_stack* stack) {
  auto number = op.schema().arguments().size();
  auto arguments = torch::jit::last(*stack, number).vec();
  auto results = run_call(op, arguments);
  torch::jit::drop(*stack, number);
  for (auto& x : results)
    stack->push_back(std::move(x));
}

operator_counts counts() {
  std::lock_guard guard{counted().mutex};
  return counted().counts;
}

void reset_counts() {
  counted().change([](operator_counts& counts) { counts = {}; });
}

} // namespace smp::sim
