#pragma once

#include "runtime/remote/invoker.hpp"
#include "transport/ids.hpp"

#include <vector>

namespace smp {

struct call_target;

/// Runs calls of other ranks on the modules of this one: of torch::nn and of
/// TorchScript, about which remote/ knows nothing.
class module_runner {
public:
  virtual ~module_runner() = default;

  /// @throws error (protocol) if `x` does not fit the module; whatever the
  /// user's module throws
  virtual invocation run(module_id module, const call_target& x, unpacker& in,
                         const std::vector<value>& args, packer& out)
    = 0;
};

} // namespace smp
