#pragma once

#include "actors/protocol/messages.hpp"
#include "transport/fabric.hpp"

#include <exception>
#include <memory>

namespace smp {

class executor;

/// The effects of a `server_core` besides the requests that it starts and the
/// messages that it sends. The core calls these in the middle of an event, so
/// an implementation must not call back into it.
class server_output {
public:
  virtual ~server_output() = default;

  // -- contexts ---------------------------------------------------------------

  /// Creates a WORKER CONTEXT. @returns what runs its requests
  virtual std::shared_ptr<executor> make_context(context_id ctx) = 0;

  /// The executor of a context threw, which is a defect: ends the context.
  virtual void crashed(context_id ctx, const std::exception_ptr& why) = 0;

  // -- messages ---------------------------------------------------------------

  /// @returns what sends a `completed` if a request could not be sent
  virtual fabric::sent_callback on_asked(request_id id) = 0;

  /// @returns what sends an `undelivered` if a response could not be sent
  virtual fabric::sent_callback on_answered(request_id id) = 0;

  // -- other ranks and the PIPELINE SCHEDULER ---------------------------------

  /// On pp_rank 0: the step body of a microbatch ended.
  virtual void body_over(response x) = 0;

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
