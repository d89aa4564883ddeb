#pragma once

// What calls tell the trace, if one runs on this thread; otherwise a no-op.

#include "transport/error.hpp"

namespace torch::nn {
class Module;
} // namespace torch::nn

namespace smp {

/// Says once per type if a module that is called is not part of the model, so
/// that nothing trains its parameters.
void note_outside_call(const torch::nn::Module& x);

/// The innermost call has an argument or a result that smp cannot send, so the
/// partition keeps its module with its caller.
/// @param why refused it, and where: "argument 0: a ... cannot be sent"
void note_unsendable(const error& why);

/// Runs `f`, which looks for tensors in what a call was given or returned.
/// Observers ignore what smp cannot send, but it is noted.
template <class F>
void note_if_unsendable(F f) {
  try {
    f();
  } catch (const error& why) {
    note_unsendable(why);
  }
}

} // namespace smp
