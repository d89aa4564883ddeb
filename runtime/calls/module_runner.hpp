#pragma once

#include "runtime/calls/invoker.hpp"
#include "transport/ids.hpp"

#include <vector>

namespace smp {

struct call_result;
struct call_target;

/// Runs calls of this rank's modules that are not made in place: calls of other
/// ranks, and recomputations in backward. Its implementations know torch::nn
/// and TorchScript, which remote/ does not.
class module_runner {
public:
  virtual ~module_runner() = default;

  /// @throws error (protocol) if `x` does not fit the module; any exception of
  /// the user's module
  virtual invocation run(module_id module, const call_target& x, unpacker& in,
                         const std::vector<value>& args, packer& out)
    = 0;

  /// Runs a call made by this rank, in its turn and with its random numbers.
  /// @param in the tensors that `args` refer to
  virtual call_result call(module_id module, const call_target& x,
                           const packer& in, const std::vector<value>& args)
    = 0;
};

} // namespace smp
