#pragma once

// Who compares two runs, or wants to know in which order a model's modules
// run, must hear of every call where it happens: on any rank, or in a process
// without a session. Observed are exactly the calls that smp can intercept.

#include "runtime/values/pack.hpp"
#include "transport/error.hpp"

#include <ATen/core/Tensor.h>

#include <span>
#include <type_traits>
#include <utility>
#include <vector>

namespace torch::nn {
class Module;
} // namespace torch::nn

namespace smp {

/// Hears of the calls on the threads where it is current. Calls of one thread
/// nest; `object` is the identity of a module, for torch::nn the address of
/// the complete object.
class call_observer {
public:
  virtual ~call_observer();

  /// @param arguments the tensors in them, each once
  virtual void begin(const void* object, std::span<const at::Tensor> arguments)
    = 0;

  /// @param results the tensors in them, each once
  virtual void end(const void* object, std::span<const at::Tensor> results)
    = 0;

  /// The call threw.
  virtual void fail(const void* object) = 0;

  /// The loss of a microbatch is known; backward has not begun.
  /// @param inputs the tensors of the microbatch
  virtual void loss(std::span<const at::Tensor> inputs, const at::Tensor& loss)
    = 0;

  /// @returns the observer of the calling thread, usually null.
  static call_observer* current() noexcept;

  /// Makes `x` the observer of the calling thread; null for none.
  static void set_current(call_observer* x) noexcept;
};

/// A call that goes on while this lives.
class observed_call {
public:
  /// Does nothing if the innermost call of this thread is one of `object`
  /// already: a module can be intercepted at two places.
  observed_call(call_observer& x, const void* object,
                std::span<const at::Tensor> arguments);

  observed_call(call_observer& x, const torch::nn::Module& object,
                std::span<const at::Tensor> arguments);

  /// The call failed if `end` was not called.
  ~observed_call();

  observed_call(const observed_call&) = delete;
  observed_call& operator=(const observed_call&) = delete;

  void end(std::span<const at::Tensor> results);

private:
  call_observer* observer_;
  const void* object_;
  const void* outer_;
};

/// @returns the tensors in `x`, each once; none if smp knows no way into a T
template <class T>
std::vector<at::Tensor> tensors_in(const T& x) {
  if constexpr (packable<T>) {
    try {
      packer p;
      put_value(p, x);
      return p.tensors();
    } catch (const error&) {
      // A type that smp cannot send is no matter of who only looks.
    }
  }
  return {};
}

/// Runs `f`, the body of a call of `object`, and lets `x` hear of it.
/// @param arguments anything that `tensors_in` takes
template <class T, class F>
auto observe(call_observer& x, const torch::nn::Module& object,
             const T& arguments, F&& f) -> decltype(f()) {
  using result_type = decltype(f());
  observed_call call{x, object, tensors_in(arguments)};
  if constexpr (std::is_void_v<result_type>) {
    f();
    call.end({});
  } else if constexpr (std::is_reference_v<result_type>) {
    auto&& result = f();
    call.end(tensors_in(result));
    return static_cast<result_type>(result);
  } else {
    auto result = f();
    call.end(tensors_in(result));
    return result;
  }
}

} // namespace smp
