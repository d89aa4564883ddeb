#pragma once

// Which modules microbatches must pass in order, and why (R19).

#include "runtime/model/module_walk.hpp"

#include <functional>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace smp {

/// A module that changes its own state, such as the statistics of a batch norm,
/// gives the numbers of a single process only if microbatches pass it in order.
/// Which modules do so is known only in part: a module with buffers may change
/// them, or just keep a mask in them. So all of these are ordered at first, and
/// those whose bits a training step left unchanged are released. Few modules
/// change parameters, so those are ordered only when one was seen to do it: in
/// the trace, or in a step, which is then run again if it can be.
class module_order {
public:
  /// An ordered module, and everything that makes it one: its own state, and
  /// that of modules below it whose calls are not intercepted (R20).
  struct entry {
    /// Positions in `walked_model::tensors`: buffers, own and read, and
    /// parameters that calls change.
    std::vector<uint32_t> state;
    /// Reasons that unchanged bits cannot refute.
    std::vector<std::string> reasons;
    /// Among its state are parameters, so that it is never released.
    bool changes_parameters = false;
    /// It has state that smp cannot put back: the user declared it.
    bool hidden = false;
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

  /// @returns the modules that are, or were at first, ordered because of it.
  std::span<const module_id> guards(uint32_t tensor) const {
    auto i = by_tensor_.find(tensor);
    return i == by_tensor_.end() ? std::span<const module_id>{}
                                 : std::span<const module_id>{i->second};
  }

  /// Records that a module keeps state that tensors do not show, which nobody
  /// has declared: orders it, for good.
  void declare(uint32_t module, const std::string& reason);

  /// Tells whether any module has state that smp cannot put back.
  bool any_hidden() const;

  /// Records that a call of a module changed such state although microbatches
  /// pass it in any order.
  void note_late_state(uint32_t module, std::string reason) {
    late_state_.emplace(module, std::move(reason));
  }

  /// @returns the modules of `note_late_state` since the last call of this
  std::map<uint32_t, std::string> take_late_state() {
    return std::exchange(late_state_, {});
  }

  /// The parameters that calls change.
  const std::set<uint32_t>& changing_parameters() const noexcept {
    return changing_parameters_;
  }

  /// Why a module is ordered: "buffers running_mean, running_var".
  std::string reason(uint32_t module) const;

  /// What still orders microbatches, as text; empty if nothing does.
  std::string text() const;

  /// Tells whether microbatches always run one after the other: code may read a
  /// parameter of another module, and autograd keeps it until backward, so that
  /// no order of calls alone gives each microbatch its own.
  bool serial() const noexcept {
    return serial_ || !changing_parameters_.empty();
  }

  void set_serial() noexcept {
    serial_ = true;
  }

  // -- what is computed again (R52) -------------------------------------------

  /// Tells whether calls change a tensor, as far as is known: calls of the
  /// first step that looked did, or that step is still running.
  bool may_change(uint32_t tensor, step_id s);

  /// Records after a call whether it has changed the tensor.
  void note_change(uint32_t tensor, bool changed);

  // -- steps that fail --------------------------------------------------------

  /// Keeps copies of the owned buffers, except large ones that no call
  /// was seen to change, and of the owned parameters: those are copied on write
  /// where that is possible, else small ones until a training step ended.
  void keep(const std::function<bool(uint32_t tensor)>& owned);

  /// Tells whether a training step ended.
  bool trained() const noexcept {
    return trained_;
  }

  /// Drops the copies: the step is over, an optimizer may write.
  void forget_kept();

  /// Restores the buffers to the last `keep`: only some microbatches of the
  /// step had changed them.
  void put_back();

  // -- changes that come late -------------------------------------------------

  /// @returns the owned tensors without an ordered module that changed since
  /// the last `keep`, or until `put_back` if that was called: buffers of
  /// released modules, and parameters.
  std::set<uint32_t> changed_late() const;

  /// @returns what has been written since the last `keep`, as far as version
  /// counters tell: "buffer 'norm.mean'"
  std::vector<std::string> changed_in_place() const;

  /// Tells whether `put_back` can undo all of them.
  bool keeps_late_changes() const;

  /// Orders the modules of these tensors, for good.
  void order_again(const std::set<uint32_t>& tensors);

  // -- the first steps --------------------------------------------------------

  /// True until a step shows which modules can be released.
  bool undecided() const noexcept {
    return undecided_;
  }

  /// Remembers the bits of the owned state.
  void before_step(const std::function<bool(uint32_t tensor)>& owned);

  /// What one rank saw in a step.
  struct observation {
    std::set<uint32_t> changed; // state
    std::set<uint32_t> trained; // modules that ran in training mode
  };

  /// @param ran tells whether this rank owns a module and ran it
  observation observe(const std::function<bool(uint32_t module)>& ran) const;

  /// Releases the modules whose state did not change.
  /// @param all what all ranks saw
  /// @returns whether there are any
  bool learn(const observation& all);

private:
  struct constant;
  /// An owned parameter that no call was seen to change.
  struct parameter {
    uint32_t tensor = 0;
    at::Tensor content;
    uint32_t version = 0;
    mutable at::Tensor kept; // copied on write; undefined if it cannot be
  };

  void keep_constant(uint32_t tensor);
  void keep_parameters(const std::function<bool(uint32_t tensor)>& owned);
  bool changed(uint32_t tensor, const constant& x) const;
  bool changed(const parameter& x) const;

  const walked_model* model_ = nullptr;
  std::map<uint32_t, entry> entries_;
  std::map<uint32_t, std::string> late_state_;
  /// Ordered modules by what is state of theirs, or of modules hidden in them.
  std::map<uint32_t, std::vector<module_id>> by_tensor_;
  /// Modules by parameters that would be their state if calls changed them.
  std::map<uint32_t, std::vector<uint32_t>> holders_;
  std::set<uint32_t> changing_parameters_;
  bool undecided_ = false;
  bool serial_ = false;
  std::map<uint32_t, std::optional<uint64_t>> hashes_; // of owned state
  std::map<uint32_t, at::Tensor> kept_;                // copies of it
  std::vector<parameter> parameters_;
  bool trained_ = false;                                // a training step ended
  std::vector<std::pair<uint32_t, uint32_t>> versions_; // of owned state
  /// Parameters that code gets writable pointers to but does not write: copies
  /// on write would be copies in each step.
  mutable std::set<uint32_t> not_kept_;
  /// An owned buffer of released modules only.
  struct constant {
    /// Autograd's counter. It also moves when the same values are written.
    mutable uint32_t version = 0;
    std::optional<uint64_t> hash; // of its bits
    at::Tensor kept;              // undefined if it is large
  };
  std::map<uint32_t, constant> constants_;
  /// By whether `put_back` restored them.
  std::map<uint32_t, bool> put_back_late_;
  struct state_change {
    step_id since;
    bool changed = false;
  };
  std::map<uint32_t, state_change> changes_;
};

template <class Inspector>
bool inspect(Inspector& f, module_order::observation& x) {
  return f.object(x).fields(f.field("changed", x.changed),
                            f.field("trained", x.trained));
}

} // namespace smp
