#pragma once

#include "actors/protocol/executor.hpp"
#include "partition/schedule.hpp"

#include <cstdint>
#include <string>
#include <vector>

namespace smp {

/// What the actors of a rank need of whoever knows models and tensors. Called
/// from any thread unless it says otherwise; nothing here may block, and all of
/// it must live longer than the actors.
class rank_services {
public:
  virtual ~rank_services() = default;

  // -- what makes things ------------------------------------------------------

  /// Makes the executor of a new WORKER CONTEXT. On the pool thread.
  virtual executor_ptr make_executor(executor_listener& listener) = 0;

  /// On pp_rank 0, unless the user brought a schedule actor: makes the schedule
  /// of one step. Called at its begin, on the pool thread.
  virtual schedule_ptr make_schedule(uint64_t microbatches) = 0;

  /// Makes the service order of this rank for one step. Called at its begin, on
  /// the pool thread.
  virtual service_order make_order(uint64_t) {
    return backward_first;
  }

  // -- requests ---------------------------------------------------------------

  /// @returns the modules that a request enters and that pass microbatches in
  /// their order (R19).
  virtual std::vector<module_id> ordered_modules(const request&) {
    return {};
  }

  /// Begins to bring the objects that a request needs (R38).
  /// @returns what is done when they are here, or null if they are
  virtual completion_ptr gather(const request&) {
    return nullptr;
  }

  /// @returns who has to give what a request still needs after `gather`, of
  /// several the first; no_rank: nobody
  virtual rank_id awaited_by(const request&) {
    return no_rank;
  }

  /// @returns the path of a module, for errors; empty if it has none.
  virtual std::string module_name(module_id) {
    return {};
  }

  // -- ends -------------------------------------------------------------------

  /// The microbatch that was started as the `turn`-th of the step, from 0, is
  /// past its forward phase (`server_options::tells_forwards`).
  virtual void forward_over(step_id, uint64_t /* turn */) {
    // nop
  }

  /// The step has its first failure.
  virtual void step_failed(step_id, const failure&) {
    // nop
  }

  /// All of a microbatch is over: what is kept for it can go (R3).
  virtual void microbatch_over(step_id, microbatch_id) {
    // nop
  }

  /// Nothing of the step executes here any more.
  virtual void step_over(step_id) {
    // nop
  }
};

} // namespace smp
