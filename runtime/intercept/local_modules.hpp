#pragma once

#include "runtime/remote/module_runner.hpp"

namespace smp {

struct model_context;

/// Runs calls on the modules of this rank: hooked ones, ranges of a Sequential
/// and those of TorchScript.
class local_modules final : public module_runner {
public:
  /// @param model outlives this
  explicit local_modules(model_context& model) : model_(model) {
    // nop
  }

  invocation run(module_id module, const call_target& x, unpacker& in,
                 const std::vector<value>& args, packer& out) override;

private:
  model_context& model_;
};

} // namespace smp
