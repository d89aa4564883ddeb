#pragma once

#include "actors/protocol/messages.hpp"

namespace smp {

/// The effects of a `server_core`. The core calls these in the middle of an
/// event, so an implementation must not call back into it.
class server_output {
public:
  virtual ~server_output() = default;

  // -- contexts, which have the token now -------------------------------------

  /// Gives `x` to a context; creates the context if its id is new.
  virtual void start(context_id ctx, request x) = 0;

  virtual void resume(context_id ctx, response x) = 0;

  // -- other ranks and the PIPELINE SCHEDULER ---------------------------------

  virtual void ask(rank_id owner, request x) = 0;

  /// Sends `x` to `x.id.origin`; if that is this rank, to the SCHEDULER.
  virtual void answer(response x) = 0;

  /// A microbatch waits for its grant, a response of the SCHEDULER. Once the
  /// SCHEDULER has decided whether anything starts, `decided` must be called.
  virtual void forward_done(const smp::forward_done& x) = 0;

  /// On pp_rank 0: the step begins.
  virtual void run(const scheduled_step& x) = 0;

  /// On pp_rank 0: all ranks must know this plan before the step begins.
  virtual void planned(const step_plan& x) = 0;

  /// On pp_rank 0, sends it to all ranks; elsewhere, to pp_rank 0.
  virtual void diverged(const step_diverged& x) = 0;

  /// The first failure of the step.
  virtual void failed(const step_failed& x) = 0;

  // -- others -----------------------------------------------------------------

  /// Sends a `completed` when `x` is done.
  virtual void report_done(request_id id, const completion_ptr& x) = 0;

  /// @returns whether the objects that `x` needs are here; if not, sends a
  /// `completed` once they are.
  virtual bool gather(const request& x) = 0;

  virtual void forward_over(const smp::forward_over&) {
    // nop
  }

  virtual void microbatch_over(const microbatch_done& x) = 0;

  /// This rank becomes busy, or has run out of work for now.
  virtual void activity(bool) {
    // nop
  }

  /// The step is over on this rank, and none of its code executes here.
  virtual void step_over(step_report x) = 0;
};

} // namespace smp
