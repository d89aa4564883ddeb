#pragma once

// Which modules microbatches must pass in order, and why (R19).

#include "runtime/model/module_walk.hpp"

#include <functional>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

namespace smp {

/// A module that changes its own state, such as the statistics of a batch norm,
/// gives the numbers of a single process only if microbatches pass it in order.
/// Which modules do so is known only in part: a module with buffers may change
/// them, or just keep a mask in them. So all of these are ordered at first, and
/// those whose bits a training step left unchanged are released.
class module_order {
public:
  /// An ordered module, and everything that makes it one: its own state, and
  /// that of modules below it whose calls are not intercepted (R20).
  struct entry {
    /// Buffers, own and read, as positions in `walked_model::tensors`.
    std::vector<uint32_t> buffers;
    /// Reasons that unchanged bits cannot refute.
    std::vector<std::string> reasons;
    bool released = false;
  };

  module_order() = default;

  /// @param declared reasons that the user gave, by object
  module_order(const walked_model& model,
               const std::map<const void*, std::string>& declared);

  /// All modules that were ordered at first, by position in the walk.
  const std::map<uint32_t, entry>& entries() const noexcept {
    return entries_;
  }

  bool ordered(uint32_t module) const;

  /// The modules that are still ordered.
  std::vector<module_id> modules() const;

  /// The ordered modules with state that tensors do not show.
  std::set<module_id> unseen() const;

  /// @returns the modules that were ordered at first because of a buffer.
  std::span<const module_id> guards(uint32_t tensor) const {
    auto i = by_buffer_.find(tensor);
    return i == by_buffer_.end() ? std::span<const module_id>{}
                                 : std::span<const module_id>{i->second};
  }

  /// Why a module is ordered: "buffers running_mean, running_var".
  std::string reason(uint32_t module) const;

  /// What still orders microbatches, as text; empty if nothing does.
  std::string text() const;

  // -- what is computed again (R52) -------------------------------------------

  /// Tells whether calls change a buffer, as far as is known: calls of the
  /// first step that looked did, or that step is still running.
  bool may_change(uint32_t tensor, step_id s);

  /// Records after a call whether it has changed the buffer.
  void note_change(uint32_t tensor, bool changed);

  // -- steps that fail --------------------------------------------------------

  /// Keeps copies of the owned buffers, except large ones that no call
  /// was seen to change.
  void keep(const std::function<bool(uint32_t tensor)>& owned);

  /// Restores the buffers to the last `keep`: only some microbatches of the
  /// step had changed them.
  void put_back();

  // -- changes that come late -------------------------------------------------

  /// @returns the owned buffers of only released modules that changed since the
  /// last `keep`, or until `put_back` if that was called.
  std::set<uint32_t> changed_late() const;

  /// Tells whether `put_back` can undo all of them.
  bool keeps_late_changes() const;

  /// Orders the modules of these buffers again, for good.
  void order_again(const std::set<uint32_t>& buffers);

  // -- the first steps --------------------------------------------------------

  /// True until a step shows which modules can be released.
  bool undecided() const noexcept {
    return undecided_;
  }

  /// Remembers the bits of the owned buffers.
  void before_step(const std::function<bool(uint32_t tensor)>& owned);

  /// What one rank saw in a step.
  struct observation {
    std::set<uint32_t> changed; // buffers
    std::set<uint32_t> trained; // modules that ran in training mode
  };

  /// @param ran tells whether this rank owns a module and ran it
  observation observe(const std::function<bool(uint32_t module)>& ran) const;

  /// Releases the modules whose state did not change.
  /// @param all what all ranks saw
  /// @returns whether there are any
  bool learn(const observation& all);

private:
  void keep_constant(uint32_t tensor);

  const walked_model* model_ = nullptr;
  std::map<uint32_t, entry> entries_;
  /// Ordered modules by a buffer of theirs, or of modules hidden in them.
  std::map<uint32_t, std::vector<module_id>> by_buffer_;
  bool undecided_ = false;
  std::map<uint32_t, std::optional<uint64_t>> hashes_; // of owned buffers
  std::map<uint32_t, at::Tensor> kept_;                // copies of them
  /// An owned buffer of released modules only.
  struct constant {
    /// Autograd's counter. It also moves when the same values are written.
    mutable uint32_t version = 0;
    std::optional<uint64_t> hash; // of its bits
    at::Tensor kept;              // undefined if it is large
  };
  bool changed(uint32_t tensor, const constant& x) const;
  std::map<uint32_t, constant> constants_;
  std::set<uint32_t> put_back_late_;
  struct buffer_change {
    step_id since;
    bool changed = false;
  };
  std::map<uint32_t, buffer_change> changes_; // buffers
};

template <class Inspector>
bool inspect(Inspector& f, module_order::observation& x) {
  return f.object(x).fields(f.field("changed", x.changed),
                            f.field("trained", x.trained));
}

} // namespace smp
