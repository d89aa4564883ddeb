#pragma once

// Comparing two runs, or learning the order in which a model's modules run,
// requires observing every call where it happens: on any rank, or in a process
// without a session. Exactly the calls that smp can intercept are observed.

#include <ATen/core/Tensor.h>

#include <span>

namespace smp {

/// Observes the calls on the threads where it is current. Calls of one thread
/// nest; `object` is the identity of a module, for torch::nn the address of the
/// complete object.
class call_observer {
public:
  virtual ~call_observer();

  /// @param arguments the tensors in the arguments, each once
  virtual void begin(const void* object, std::span<const at::Tensor> arguments)
    = 0;

  /// @param results the tensors in the results, each once
  virtual void end(const void* object, std::span<const at::Tensor> results) = 0;

  /// The call threw.
  virtual void fail(const void* object) = 0;

  /// The step's body has the results of a microbatch, such as its loss.
  /// @param inputs the tensors of the microbatch
  virtual void body_done(std::span<const at::Tensor> inputs,
                         std::span<const at::Tensor> results)
    = 0;

  /// Discards the calls of this step so far: the step begins anew. No call is
  /// running.
  virtual void take_back() = 0;

  /// @returns the observer of the calling thread, usually null.
  static call_observer* current() noexcept;

  /// Makes `x` the observer of the calling thread; null for none.
  static void set_current(call_observer* x) noexcept;
};

} // namespace smp
