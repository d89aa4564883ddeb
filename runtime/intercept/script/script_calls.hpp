#pragma once

// Calls of TorchScript modules: the operations that `rewrite` inserts into
// their code, and how an owner serves a request for one of its modules.

#include "runtime/calls/caller.hpp"
#include "runtime/calls/invoker.hpp"
#include "runtime/model/module_walk.hpp"
#include "runtime/model/script_code.hpp"
#include "runtime/model/script_walk.hpp"

#include <ATen/core/ivalue.h>

#include <string>
#include <vector>

namespace smp {

struct model_context;

/// The rewritten code of a model.
class script_program {
public:
  /// Rewrites the classes of `x`, which must not have run yet.
  /// @throws error (unsupported) if the code cannot run on several ranks
  script_program(const walked_model& x, size_t ranks);

  const script_code& code() const noexcept {
    return code_;
  }

private:
  std::vector<c10::ClassTypePtr> classes_;
  script_code code_;
};

/// Runs a method of the model, e.g. of its root in a step body.
/// @throws error (user_code) with the module and the cause
c10::IValue run_method(const script_object& self, const std::string& method,
                       std::vector<c10::IValue> args);

/// Runs the operation that `x` requests on a module of this rank.
/// @throws error (protocol) if the module has no such method or attribute
invocation run_script(model_context& model, module_id module,
                      const call_target& x, unpacker& in,
                      const std::vector<value>& args, packer& out);

} // namespace smp
