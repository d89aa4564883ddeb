#pragma once

// Everything that happens around module calls is in one place, in one order,
// for torch::nn, Sequential and TorchScript alike.

#include "runtime/base/here.hpp"
#include "transport/ids.hpp"

#include <ATen/core/Tensor.h>

#include <array>
#include <memory>
#include <optional>
#include <span>
#include <vector>

namespace smp {

struct invocation;
class offloaded_tensors;
struct packed_call;
class packer;
class unpacker;

/// A call of a module that runs on this rank.
struct intercepted_call {
  /// Its id; nullopt for a module outside of the session's model.
  std::optional<module_id> module = {};
  /// Microbatches pass the module in order (R19).
  bool ordered = false;
  /// The requester handles the call's turn and its report to inspection: the
  /// MODULE SERVER, for a request of another rank.
  bool served = false;
  /// Its number in the paths of random numbers (R23); 0: none.
  uint64_t stream = 0;
  /// Returns a tensor or a tuple of tensors; otherwise its calls always wait.
  bool tensors_only = true;
  /// One of several modules of a served request, which inspection therefore
  /// sees only here.
  bool part = false;
};

/// Intercepts every call of one thread. `leave` follows each `enter` that
/// returned; calls of a thread nest.
class call_interceptor {
public:
  virtual ~call_interceptor();

  /// Before anything else. May park; may throw.
  virtual void enter(const intercepted_call&) {
    // nop
  }

  /// True if it needs the tensors, which must be searched for.
  virtual bool looks() const noexcept {
    return false;
  }

  /// The module starts. @param object identity of the module, for torch::nn the
  /// address of the complete object
  /// @param xs tensors in the arguments, each once
  virtual void arguments(const intercepted_call&, const void* /* object */,
                         std::span<const at::Tensor> /* xs */) {
    // nop
  }

  /// The module is done.
  virtual void results(const intercepted_call&,
                       std::span<const at::Tensor> /* xs */) {
    // nop
  }

  virtual void leave(const intercepted_call&, bool /* failed */) {
    // nop
  }

  /// Runs a call of a region (`model_map::recomputed`), whose arguments are
  /// packed: by `local_modules::run_inside`, now, and again later if needed.
  /// @returns nullopt to leave the call to the inner interceptors
  virtual std::optional<invocation> around(const packed_call& x, unpacker& in,
                                           packer& out);

  /// An outer interceptor keeps `xs` until backward needs them; nothing else
  /// holds these tensors, though their bytes may be shared.
  /// @returns an object that restores the bytes; null: they stay in place
  virtual std::unique_ptr<offloaded_tensors>
  keep(const std::vector<at::Tensor>& xs);
};

/// The interceptors of a call, from the outermost to the innermost;
/// `num_interceptors` in all.
enum class interceptor : uint8_t {
  order,     // waits for the turn of the microbatch
  numbers,   // swaps random streams
  recompute, // reruns checkpointed calls in backward
  offload,   // moves tensors kept for that to a file
  state,     // gives a recomputation the state of the first pass
  trace,     // measures before the partition
  observe,   // informs call observers
  device,    // waits for it, to know whose its errors are
  activity,  // records what the rank executes, for stall reports
};

/// Makes `x` intercept the calls of the calling thread; null: none.
void set_interceptor(interceptor place, call_interceptor* x) noexcept;

/// @param place in the order of `interceptor`
/// @returns the calling thread's interceptor at that place, or null
call_interceptor* interceptor_at(size_t place) noexcept;

/// Asks the interceptors of the calling thread, from the outermost inwards.
/// @returns the result of the first one that takes `xs`, see
/// `call_interceptor::keep`; or null
std::unique_ptr<offloaded_tensors>
keep_for_backward(const std::vector<at::Tensor>& xs);

/// RAII guard for the duration of a call.
class call_scope {
public:
  explicit call_scope(const intercepted_call& x);
  ~call_scope();
  call_scope(const call_scope&) = delete;
  call_scope& operator=(const call_scope&) = delete;

  /// Tells whether any interceptor needs the tensors.
  bool looks() const noexcept {
    return looks_;
  }

  /// @returns nullopt for a module outside of the session's model
  std::optional<module_id> module() const noexcept {
    return call_.module;
  }

  void arguments(const void* object, std::span<const at::Tensor> xs);

  void results(std::span<const at::Tensor> xs);

private:
  void leave(bool failed);

  intercepted_call call_;
  std::array<call_interceptor*, num_interceptors> entered_ = {};
  int exceptions_;
  bool looks_ = false;
};

} // namespace smp
