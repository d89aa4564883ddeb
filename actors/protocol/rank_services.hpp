#pragma once

#include "actors/protocol/request.hpp"
#include "partition/schedule/schedule.hpp"

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace smp {

class executor;

/// What the actors of a rank call on the layer that knows models and tensors.
/// Called on any thread unless noted otherwise. Nothing here may block.
/// Everything here must outlive the actors.
class rank_services {
public:
  virtual ~rank_services() = default;

  // -- what makes things ------------------------------------------------------

  /// Makes the executor of a new WORKER CONTEXT. Called on the pool thread.
  virtual std::shared_ptr<executor> make_executor() = 0;

  /// On pp_rank 0, unless the user supplied a schedule actor: makes the
  /// schedule of one step. Called when the step begins, on the pool thread.
  virtual schedule_ptr make_schedule(uint64_t microbatches) = 0;

  /// Makes the service order of this rank for one step. Called when the step
  /// begins, on the pool thread.
  virtual service_order make_order(uint64_t) {
    return backward_first;
  }

  // -- requests ---------------------------------------------------------------

  /// @returns the modules that a request enters and through which microbatches
  /// must pass in order (R19).
  virtual std::vector<module_id> ordered_modules(const request&) {
    return {};
  }

  /// Starts to fetch the objects that a request needs (R38).
  /// @returns a completion, done when all have arrived; null if they have
  virtual completion_ptr gather(const request&) {
    return nullptr;
  }

  /// @returns the rank that must supply what a request still lacks after
  /// `gather`, the first of several; no_rank: none
  virtual rank_id awaited_by(const request&) {
    return no_rank;
  }

  /// @returns the path of a module, for error texts; empty if it has none.
  virtual std::string module_name(module_id) {
    return {};
  }

  // -- ends -------------------------------------------------------------------

  /// The microbatch that was started as the `start_number`-th of the step, from
  /// 0, has finished its forward phase (`server_options::tells_forwards`).
  virtual void forward_over(step_id, uint64_t /* start_number */) {
    // nop
  }

  /// The step has its first failure.
  virtual void step_failed(step_id, const failure&) {
    // nop
  }

  /// A microbatch is over on all ranks: its saved data can be freed (R3).
  virtual void microbatch_over(step_id, microbatch_id) {
    // nop
  }

  /// No code of the step executes on this rank any more.
  virtual void step_over(step_id) {
    // nop
  }
};

} // namespace smp
