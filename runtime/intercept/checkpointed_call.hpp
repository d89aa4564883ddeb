#pragma once

#include "runtime/remote/caller.hpp"
#include "runtime/remote/invoker.hpp"
#include "transport/ids.hpp"

#include <ATen/core/Tensor.h>

#include <vector>

namespace smp {

class execution;
class local_modules;
class model_map;

/// A call of a region, see `model_map::recomputed`.
struct region_call {
  local_modules& modules;
  const model_map& map;
  module_id module;
  const call_target& target;
  const std::vector<value>& args;
};

/// Activations take most of the memory of training, and backward wants all that
/// autograd keeps of them. Of this call it keeps nothing but the arguments
/// (R52): the code runs without grad now, and once more, with grad, when a
/// gradient of one of its results comes. (Paper, appendix on activation
/// checkpointing.)
/// @param tensors that `x.args` name
/// @throws error (unsupported) naming the module if it cannot be computed
/// again; whatever the user's module throws
invocation run_checkpointed(const region_call& x, execution& ex,
                            const std::vector<at::Tensor>& tensors,
                            packer& out);

} // namespace smp
