#pragma once

#include "runtime/intercept/call_scope.hpp"

namespace smp {

/// Activations take most of the memory of training, and backward wants all that
/// autograd keeps of them. Of a call of a region (`model_map::recomputed`) it
/// keeps nothing but the arguments (R52): the code runs without grad now, and
/// once more, with grad, when a gradient of one of its results comes. (Paper,
/// appendix on activation checkpointing.)
class recompute_interceptor final : public call_interceptor {
public:
  /// @throws error (unsupported) naming the module if it cannot be computed
  /// again; whatever the user's module throws
  std::optional<invocation> around(const packed_call& x, unpacker& in,
                                   packer& out) override;
};

} // namespace smp
