#pragma once

#include "actors/protocol/messages.hpp"

namespace smp {

/// What a `server_core` makes happen. Called in the middle of an event, so it
/// must not call back.
class server_output {
public:
  virtual ~server_output() = default;

  // -- contexts: they have the token now --------------------------------------

  /// Gives `x` to a context; one with a new id has to be made.
  virtual void start(context_id ctx, request x) = 0;

  virtual void resume(context_id ctx, response x) = 0;

  // -- contexts: they gave the token back -------------------------------------

  /// The context waits for what `x` is answered with.
  /// @param x 0: the call is refused
  virtual void parked(context_id, request_id) {
    // nop
  }

  /// What it waited for came; now it waits for the token.
  virtual void answered(context_id) {
    // nop
  }

  virtual void idle(context_id) {
    // nop
  }

  /// The context died.
  virtual void lost(context_id) {
    // nop
  }

  // -- other ranks and the PIPELINE SCHEDULER ---------------------------------

  virtual void ask(rank_id owner, request x) = 0;

  virtual void ask(rank_id owner, recorded_request x) = 0;

  /// Goes to `x.id.origin`; if that is this rank, to the SCHEDULER.
  virtual void answer(response x) = 0;

  virtual void answer(recorded_response x) = 0;

  /// A microbatch waits for its grant: a response of the SCHEDULER. When that
  /// decided whether anything starts, it leads to `decided`.
  virtual void forward_done(const smp::forward_done& x) = 0;

  /// On pp_rank 0: the step began.
  virtual void run(const scheduled_step& x) = 0;

  /// On pp_rank 0: all ranks have to know before the step begins.
  virtual void planned(const step_plan& x) = 0;

  /// From pp_rank 0 this goes to all ranks, else to pp_rank 0.
  virtual void diverged(const step_diverged& x) = 0;

  /// The step has its first failure.
  virtual void failed(const step_failed& x) = 0;

  // -- others -----------------------------------------------------------------

  /// Reports by `completed` when `x` is done.
  virtual void report_done(request_id id, const completion_ptr& x) = 0;

  /// @returns whether the objects that `x` needs are here; else reports by
  /// `completed` when they are.
  virtual bool gather(const request& x) = 0;

  virtual void forward_over(const smp::forward_over&) {
    // nop
  }

  virtual void microbatch_over(const microbatch_done& x) = 0;

  /// This rank begins to work, or has nothing left to do for now.
  virtual void activity(bool) {
    // nop
  }

  /// The step is over here and nothing of it executes.
  virtual void step_over(step_report x) = 0;
};

} // namespace smp
