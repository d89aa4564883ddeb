#pragma once

#include "actors/protocol/messages.hpp"
#include "actors/replay/step_record.hpp"

#include <memory>
#include <optional>
#include <string>

namespace smp {

/// Lets a rank do what it did in a recorded step: in the same order, and
/// without saying again what its messages look like (R33).
///
/// What is ready does not start before its turn. That cannot end in a deadlock
/// as long as the flow is the recorded one. All ranks replay the same step, and
/// their orders are parts of one sequence in which it really happened: whatever
/// comes first in that sequence and is not done yet waits only for what is
/// done. This holds as well for a request that is blocked behind another one or
/// for the objects that it names: in the sequence, both were there before it
/// started.
///
/// Waits that are no requests (for a fetch, for a turn, for the content of a
/// promise, for the answers to promises) have no place in the order, as timing
/// decides whether they happen. An execution that waits so keeps its place and
/// may go on at any time, unless others had the token meanwhile in the record
/// too. If no others had it, whatever comes later in the order of this rank
/// started after that wait was over, or would have been. So what is waited for
/// was made before, and needs none of the later ones now.
///
/// A wait for peers in other pipelines has no place either. Pipelines that
/// share modules replay the same step, so that the above holds for all of them
/// together. Where they follow the same computed order, in which nobody waited
/// for peers, who waits for them keeps its place as well: its peers come to it
/// in the same place, and nothing there depends on timing.
///
/// Each execution checks by itself that the flow is the recorded one: it makes
/// the recorded calls one after the other, promises included, and ends. So some
/// rank sees every divergence, and from then on all serve without the record.
class step_replay {
public:
  /// @param forms requests and answers must look as recorded, and need not be
  ///        sent again; else only the order counts
  /// @param same_order see `step_plan::same_order`
  step_replay(std::shared_ptr<const step_record> record, step_id step,
              bool forms, bool same_order = false);

  // -- the order --------------------------------------------------------------

  bool next_is(const request& x) const;

  /// Tells whether an execution that got its answer or grant may go on now.
  bool may_resume(request_id execution) const;

  void started(const request& x);

  void resumed(request_id execution);

  /// @param for_peers see `wait_reason::for_peers`
  void waits(request_id execution, bool for_peers);

  void woken(request_id execution);

  // -- the flow ---------------------------------------------------------------

  /// What the record says of a call.
  struct known_call {
    uint32_t number = 0;
    /// How the flow diverges from the record; else empty.
    std::string divergence;
  };

  known_call call(request_id execution, const smp::call& x);

  /// An execution ends with `x`.
  /// @returns how the flow diverges from the record; else empty
  std::string end(request_id execution, const payload& x);

  /// Tells whether messages name the record instead of repeating it.
  bool forms() const noexcept {
    return forms_;
  }

  /// From now on nothing is expected any more.
  void diverge() noexcept {
    diverged_ = true;
  }

  bool diverged() const noexcept {
    return diverged_;
  }

  // -- messages that name the record ------------------------------------------

  /// @throws error (protocol) if the record has no such request
  request restore(recorded_request x) const;

  /// @throws error (protocol) if the record has no such answer
  response restore(recorded_response x) const;

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
  payload restore(const message_form& form,
                  std::vector<tensor_ref> tensors) const;

  std::shared_ptr<const step_record> record_;
  step_id step_;
  bool forms_;
  bool same_order_;
  bool diverged_ = false;
  size_t position_ = 0; // in the order
  std::map<request_id, progress> running_;
  std::optional<request_id> holder_; // waits and keeps its place
};

} // namespace smp
