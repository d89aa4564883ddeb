#pragma once

// How an owner runs a call. Every rank runs the same binary, so the caller
// names the instantiated function by its type.

#include "runtime/values/pack.hpp"
#include "runtime/values/value.hpp"

#include <cstdint>
#include <utility>
#include <vector>

namespace torch::nn {
class Module;
} // namespace torch::nn

namespace smp {

struct invocation {
  value result;
  /// New content of non-tensor arguments that the callee may change (R12), by
  /// position.
  std::vector<std::pair<uint32_t, value>> changed;
};

using invoker_function = invocation (*)(torch::nn::Module& object, unpacker& in,
                                        const std::vector<value>& args,
                                        packer& out);

/// Registers `f` under the name of its type; called before main.
/// @returns the number that identifies it in messages
uint64_t register_invoker(const char* type_name, invoker_function f);

/// @throws error (protocol) if nothing is registered under `x`
invoker_function find_invoker(uint64_t x);

} // namespace smp
