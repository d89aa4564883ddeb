#pragma once

#include "runtime/remote/invoker.hpp"
#include "transport/ids.hpp"

#include <vector>

namespace smp {

struct call_result;
struct call_target;

/// Runs calls on the modules of this rank that are not made in place: those of
/// other ranks, and those that are computed again in backward. Of torch::nn and
/// of TorchScript, about which remote/ knows nothing.
class module_runner {
public:
  virtual ~module_runner() = default;

  /// @throws error (protocol) if `x` does not fit the module; whatever the
  /// user's module throws
  virtual invocation run(module_id module, const call_target& x, unpacker& in,
                         const std::vector<value>& args, packer& out)
    = 0;

  /// Runs a call of this rank's own, in its turn and with its random numbers.
  /// @param in the tensors that `args` name
  virtual call_result call(module_id module, const call_target& x,
                           const packer& in, const std::vector<value>& args)
    = 0;
};

} // namespace smp
