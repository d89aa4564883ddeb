#pragma once

// Whatever has to happen around the calls of modules happens in one place, in
// one order, for torch::nn, Sequential and TorchScript alike.

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
  /// Its id; nothing for a module that is not of the session's model.
  std::optional<module_id> module = {};
  /// Microbatches pass the module in their order (R19).
  bool ordered = false;
  /// Who asked for it took care of its turn, and of who looks at the rank:
  /// the MODULE SERVER where another rank did.
  bool served = false;
  /// What stands for it in the paths of random numbers (R23); 0: nothing.
  uint64_t stream = 0;
  /// It returns a tensor or a tuple of tensors: else calls of it always wait.
  bool tensors_only = true;
  /// One of several modules of what is served, so that those who look at the
  /// rank know of it only here.
  bool part = false;
};

/// Hears of every call of one thread. `leave` follows each `enter` that
/// returned; calls of a thread nest.
class call_interceptor {
public:
  virtual ~call_interceptor();

  /// Before anything else. May park; may throw.
  virtual void enter(const intercepted_call&) {
    // nop
  }

  /// True if it wants the tensors, which have to be searched for.
  virtual bool looks() const noexcept {
    return false;
  }

  /// The module starts now. @param object identity of the module, for torch::nn
  /// the address of the complete object
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

  /// Runs a call whose arguments are packed, as those of other ranks are, and
  /// those of a module that this one wants: by `local_modules::run_inside`,
  /// now, and again later if it likes.
  /// @returns nothing if it leaves the call to those further inside
  virtual std::optional<invocation> around(const packed_call& x, unpacker& in,
                                           packer& out);

  /// One further outside keeps `xs` until a backward wants them; nobody else
  /// has these tensors, but perhaps their bytes.
  /// @returns what puts the bytes back; null: they stay where they are
  virtual std::unique_ptr<offloaded_tensors>
  keep(const std::vector<at::Tensor>& xs);
};

/// Who hears of a call, from the outside to the inside.
enum class interceptor : uint8_t {
  order,     // waits for the turn of the microbatch
  numbers,   // swaps random streams
  recompute, // runs once more in backward what is checkpointed
  offload,   // moves what is kept for that to a file
  state,     // shows what is computed again the state of its first time
  trace,     // measures before the partition
  observe,   // tells whoever compares runs
  activity,  // what the rank executes, for stall reports
};

inline constexpr size_t num_interceptors = 8;

/// Makes `x` hear of the calls of the calling thread; null: nobody does.
void set_interceptor(interceptor place, call_interceptor* x) noexcept;

/// @param place in the order of `interceptor`
/// @returns who hears of the calls of the calling thread there, or null
call_interceptor* interceptor_at(size_t place) noexcept;

/// Asks the interceptors of the calling thread, from the outside to the inside.
/// @returns what the first one does that takes `xs`, see
/// `call_interceptor::keep`; or null
std::unique_ptr<offloaded_tensors>
keep_for_backward(const std::vector<at::Tensor>& xs);

/// A call that lasts as long as this.
class call_scope {
public:
  explicit call_scope(const intercepted_call& x);
  ~call_scope();
  call_scope(const call_scope&) = delete;
  call_scope& operator=(const call_scope&) = delete;

  /// Tells whether anybody wants to hear of tensors.
  bool looks() const noexcept {
    return looks_;
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
