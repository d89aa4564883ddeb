#pragma once

// Which modules microbatches have to pass in their order, and why (R19).

#include "actors/protocol/request.hpp"
#include "runtime/model/hook.hpp"
#include "runtime/model/module_walk.hpp"

#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace smp {

class engine;
class execution;

/// A module that changes what it computes with, such as the statistics of a
/// batch norm, gives the numbers of one process only if microbatches come in
/// order. Which do is known in part only: a module with buffers may change
/// them, or keep a mask in them. So all are ordered at first, and those whose
/// bits one training step left alone are released.
class module_order {
public:
  /// An ordered module, and all that makes it one: its own state, and that of
  /// modules below it whose calls nobody sees (R20).
  struct entry {
    /// Buffers, own and read, as positions in `walked_model::tensors`.
    std::vector<uint32_t> buffers;
    /// What no look at bits can take back.
    std::vector<std::string> reasons;
    bool released = false;
  };

  module_order() = default;

  /// @param declared reasons of a user, by object
  module_order(const walked_model& model,
               const std::map<const void*, std::string>& declared);

  /// All modules that were ordered at first, by position in the walk.
  const std::map<uint32_t, entry>& entries() const noexcept {
    return entries_;
  }

  bool ordered(uint32_t module) const;

  /// Those that are still ordered.
  std::vector<module_id> modules() const;

  /// @returns the ordered modules that a request of another rank, or the step
  /// body, enters. Any thread.
  std::vector<module_id> entered_by(const request& x) const;

  /// Why a module is ordered: "buffers running_mean, running_var".
  std::string reason(uint32_t module) const;

  /// What still orders microbatches, for people; empty if nothing does.
  std::string text() const;

  // -- the first steps --------------------------------------------------------

  /// True until a step told which modules can be released.
  bool undecided() const noexcept {
    return undecided_;
  }

  /// Remembers the bits of the owned buffers.
  void before_step(const std::function<bool(uint32_t tensor)>& owned);

  /// Compares them, with the other ranks. Collective.
  void after_step(engine& eng);

private:
  const walked_model* model_ = nullptr;
  std::map<uint32_t, entry> entries_;
  /// Ordered modules by a buffer that they or what they hide owns.
  std::map<uint32_t, std::vector<module_id>> by_buffer_;
  bool undecided_ = false;
  std::map<uint32_t, std::optional<uint64_t>> hashes_; // of owned buffers
};

/// A call of a module on its own rank: waits for its turn if the module is
/// ordered, and gives the token back meanwhile.
class ordered_call {
public:
  explicit ordered_call(const hook_state& x) : ordered_call(x.id, x.ordered) {
    // nop
  }
  ordered_call(module_id x, bool ordered);
  ~ordered_call();
  ordered_call(const ordered_call&) = delete;
  ordered_call& operator=(const ordered_call&) = delete;

private:
  void enter(module_id x);

  execution* execution_ = nullptr; // set if it entered
  module_id module_;
};

/// Tells that `x` changes state that smp cannot see, such as a counter that is
/// a member of its class: microbatches then pass it in their order. Buffers
/// need no such word. Before the partition, on every rank.
/// @param why for the partition print: "counts its calls"
void set_stateful(torch::nn::Module& x, std::string why);

} // namespace smp
