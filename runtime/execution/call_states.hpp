#pragma once

#include "runtime/execution/recompute_pass.hpp"
#include "transport/ids.hpp"

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace smp {

class kept_attributes;
class map_changes;
class running_call;

/// The state of a module as a call found it, before the call changed it.
struct module_state {
  /// By position in the walk of the model.
  std::vector<std::pair<uint32_t, at::Tensor>> tensors;
  /// Of the module, and of those below it if it has state that is no tensor,
  /// as code may change the attributes of other modules. By position in the
  /// walk.
  std::vector<std::pair<uint32_t, std::shared_ptr<kept_attributes>>> attributes;

  bool empty() const noexcept {
    return tensors.empty() && attributes.empty();
  }
};

/// A recomputation must see the state that the first pass saw, and must leave
/// the module's current state untouched (R52). The first pass keeps what a call
/// will change; the second puts it back until the backward of its code is over,
/// as autograd may keep a buffer itself. While it waits, other executions see
/// the current state. Covers modules that microbatches pass in order (R19):
/// others have no state.
class call_states {
public:
  /// A second pass and its backward; they nest.
  class recalled {
  public:
    explicit recalled(call_states& x) : states_(x), begin_(x.calls_.size()) {
      // nop
    }

    ~recalled();
    recalled(const recalled&) = delete;
    recalled& operator=(const recalled&) = delete;

  private:
    call_states& states_;
    size_t begin_;
  };

  /// A call of `module` begins.
  void enter(running_call& ex, map_changes& changes, module_id module);

  /// The call ends.
  void leave(running_call& ex, map_changes& changes, module_id module);

  /// Other executions run until `resume`.
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
    bool over = false; // its code has run; not put back yet
    module_state state;
  };

  /// Gives the module the state that `x` has, and `x` that of the module.
  static void exchange(running& x);

  std::vector<running> calls_; // as they began
};

} // namespace smp
