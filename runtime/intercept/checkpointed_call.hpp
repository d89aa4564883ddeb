#pragma once

#include "runtime/intercept/call_scope.hpp"

namespace smp {

/// Activations take most of the memory of training, because autograd saves them
/// for backward. For a call of a region (`model_map::recomputed`) this keeps
/// only the arguments (R52): the code runs without grad now, and once more,
/// with grad, when a gradient of one of its results arrives. (Paper, appendix
/// on activation checkpointing.)
class recompute_interceptor final : public call_interceptor {
public:
  /// @throws error (unsupported) naming the module if it cannot be recomputed;
  /// any exception of the user's module
  std::optional<invocation> around(const packed_call& x, unpacker& in,
                                   packer& out) override;
};

} // namespace smp
