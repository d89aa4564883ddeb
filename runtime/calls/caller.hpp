#pragma once

// A call of a module owned by another rank, from the caller's side: a request,
// a wait, and results with an autograd node behind them.

#include "runtime/calls/request_kind.hpp"
#include "runtime/model/hook.hpp"
#include "runtime/values/pack.hpp"
#include "runtime/values/value.hpp"
#include "transport/error.hpp"
#include "transport/ids.hpp"

#include <cstdint>
#include <string>
#include <vector>

namespace c10 {
class OperatorHandle;
struct IValue;
} // namespace c10

namespace smp {

/// What to run at the owner.
struct call_target {
  request_kind kind = request_kind::call;
  /// call: hash of the registered `invoker` to run on the hooked module
  /// (runtime/intercept/submodule.hpp).
  uint64_t invoker = 0;
  /// TorchScript modules: name of the method or attribute.
  std::string name = {};
  /// range and method_range: children [first, last) of a Sequential (R8), the
  /// module being the Sequential.
  uint32_t first = 0;
  uint32_t last = 0;
  /// `is_training()` of the called module.
  bool training = true;
  /// Its result can be predicted from an earlier call (R38): it is declared to
  /// return a tensor or a tuple of tensors, or what it returned decides.
  bool tensors_only = false;
  /// This rank makes the call itself: no MODULE SERVER tracks it.
  bool own = false;
};

struct call_result {
  value result;
  /// New content of non-tensor arguments that the callee changed (R12):
  /// (position, content).
  std::vector<std::pair<uint32_t, value>> changed;
  unpacker tensors;
};

struct prediction;

/// Prepends the module to an error that names a position in its arguments or
/// results: "call of 'blocks.3': argument 0: ...".
[[noreturn]] void fail_call(module_id module, const error& err);

/// Runs `x` at the owner of `module`, which may be this rank. Tensors that the
/// callee changed in place are written back before this returns (R12).
/// @param in the tensors that `args` name
/// @throws error (user_code, rank_down, ...) with rank and module of the cause
call_result call_remote(rank_id owner, module_id module, const call_target& x,
                        const packer& in, std::vector<value> args);

/// Adds two promises of the same owner there: otherwise a residual connection,
/// or a sum of gradients, would transfer both operands here and the sum back.
/// @param stack arguments of `op`, replaced by its result
/// @returns false if the operation is not such a sum
bool add_remotely(const c10::OperatorHandle& op,
                  std::vector<c10::IValue>& stack);

} // namespace smp
