#pragma once

#include "runtime/remote/recompute_pass.hpp"
#include "transport/ids.hpp"

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace smp {

class execution;
class map_changes;

/// What a call of a module found in it before it changed it.
struct module_state {
  /// By position in the walk of the model.
  std::vector<std::pair<uint32_t, at::Tensor>> buffers;
  /// Of a TorchScript module, by slot: what is no module.
  std::vector<std::pair<size_t, c10::IValue>> attributes;

  bool empty() const noexcept {
    return buffers.empty() && attributes.empty();
  }
};

/// What is computed again must find the state that it found the first time, and
/// leave the state that it found (R52). So the first pass keeps what a call
/// will change, and the second one puts it back while its code runs; whoever
/// runs meanwhile, as it waits, sees the state of now. By a module that
/// microbatches pass in their order (R19): others have no state.
class call_states {
public:
  /// A call of `module` begins.
  void enter(execution& ex, map_changes& changes, module_id module);

  /// It is over.
  void leave(execution& ex, map_changes& changes, module_id module);

  /// Others run until `resume`.
  void suspend();

  void resume();

  void end() {
    calls_.clear();
  }

private:
  struct running {
    module_id module;
    uint64_t path = 0;
    map_changes* changes = nullptr;
    bool again = false;
    module_state state;
    std::vector<at::Tensor> tensors = {}; // by buffer, where it is exchanged
  };

  static void recall(running& x);
  static void put_back(running& x);

  std::vector<running> calls_; // innermost last
};

} // namespace smp
