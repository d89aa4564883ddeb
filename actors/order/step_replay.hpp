#pragma once

#include "actors/order/step_record.hpp"
#include "actors/protocol/messages.hpp"

#include <memory>
#include <optional>
#include <string>

namespace smp {

/// Makes a rank repeat what it did in a recorded step, in the same order (R33).
///
/// Ready work does not start before its turn. That cannot deadlock as long as
/// the flow is the recorded one: all ranks replay the same step, and their
/// orders are parts of one sequence that really happened, so whatever comes
/// first in that sequence and is not done yet waits only for work that is
/// done. The same holds for a request that is blocked behind another one or
/// for the objects that it names: in the sequence, both were there before it
/// started.
///
/// Waits other than requests (for a fetch, for a turn, for the content of a
/// promise, for the answers to promises) have no place in the order, as timing
/// decides whether they happen. An execution in such a wait keeps its place and
/// may resume at any time, unless others held the token meanwhile in the record
/// too. If no others held it, everything later in the order of this rank
/// started after that wait was over, or would have been. So what is awaited was
/// made earlier and needs none of the later work now.
///
/// A wait for peers in other pipelines has no place either. Pipelines that
/// share modules replay the same step, so the above holds for all of them
/// together. If they follow the same computed order, in which no rank waited
/// for peers, an execution that waits for peers keeps its place as well: its
/// peers reach the wait at the same place, and nothing there depends on timing.
///
/// Each execution checks that the flow is the recorded one: it makes the
/// recorded calls in sequence, promises included, and ends. So some rank sees
/// every divergence, and from then on all ranks serve without the record.
class step_replay {
public:
  /// @param same_order see `step_plan::same_order`
  explicit step_replay(std::shared_ptr<const step_record> record,
                       bool same_order = false);

  // -- the order --------------------------------------------------------------

  bool next_is(const request& x) const;

  /// Tells whether an execution that has its answer or grant may resume now.
  bool may_resume(request_id execution) const;

  void started(const request& x);

  void resumed(request_id execution);

  /// @param for_peers see `wait_reason::for_peers`
  void waits(request_id execution, bool for_peers);

  void woken(request_id execution);

  // -- the flow ---------------------------------------------------------------

  /// What the record says about a call.
  struct known_call {
    uint32_t number = 0;
    /// How the flow diverges from the record; empty if it does not.
    std::string divergence;
  };

  known_call call(request_id execution, const smp::call& x);

  /// An execution ends.
  /// @returns how the flow diverges from the record; empty if it does not
  std::string end(request_id execution);

  /// From now on, the step is not held to its record.
  void diverge() noexcept {
    diverged_ = true;
  }

  bool diverged() const noexcept {
    return diverged_;
  }

  const step_record& record() const noexcept {
    return *record_;
  }

private:
  struct progress {
    uint32_t segment = 0;
    uint32_t calls = 0;
  };

  const recorded_execution* find(request_id x) const {
    return record_->find(x);
  }

  bool next_is(request_id execution, uint32_t segment) const;

  std::shared_ptr<const step_record> record_;
  bool same_order_;
  bool diverged_ = false;
  size_t position_ = 0; // in the order
  std::map<request_id, progress> running_;
  std::optional<request_id> holder_; // waits and keeps its place
};

} // namespace smp
