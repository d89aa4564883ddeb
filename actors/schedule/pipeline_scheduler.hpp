#pragma once

#include "actors/protocol/actors.hpp"
#include "actors/protocol/rank_services.hpp"
#include "actors/schedule/schedule_actor.hpp"
#include "actors/schedule/schedule_dialog.hpp"
#include "actors/schedule/step_driver.hpp"
#include "actors/schedule/user_schedule.hpp"

#include <caf/actor_clock.hpp>
#include <caf/stateful_actor.hpp>

#include <optional>

namespace smp {

struct pipeline_scheduler_state : driver_output, schedule_asker {
  static inline const char* name = "smp.pipeline-scheduler";

  using pointer = pipeline_scheduler_actor::stateful_pointer<
    pipeline_scheduler_state>;

  explicit pipeline_scheduler_state(pointer self) : self(self) {
    // nop
  }

  /// Ends the user's schedule actor.
  ~pipeline_scheduler_state() override;

  // -- driver_output ----------------------------------------------------------

  void start(request x) override;
  void grant(response x) override;
  void forward_over(const smp::forward_over& x) override;
  void microbatch_over(const microbatch_done& x) override;
  void failed(const step_failed& x) override;
  void step_over(step_report x) override;

  // -- the user's actor -------------------------------------------------------

  void ask(uint64_t number, const schedule_event& x) override;

  /// Makes the schedule of a step, which asks the user's actor to decide.
  schedule_ptr converse(step_id step, uint64_t microbatches);

  void answered(uint64_t number, const schedule_answer& x);

  void no_answer(uint64_t number, const caf::error& why);

  /// Ends an actor that failed, so that it is not asked again.
  void dismiss();

  scheduler_status status() const;

  pointer self;
  module_server_actor server;
  std::optional<step_driver> driver;
  std::shared_ptr<const user_schedule> user; // may be null
  schedule_actor user_actor;
  schedule_dialog* dialog = nullptr; // of the running step
  uint64_t questions = 0;            // over all steps
  caf::actor_clock::time_point asked_at;
};

pipeline_scheduler_actor::behavior_type
pipeline_scheduler(pipeline_scheduler_state::pointer self, rank_id rank,
                   module_server_actor server, rank_services* services,
                   std::shared_ptr<const user_schedule> user);

} // namespace smp
