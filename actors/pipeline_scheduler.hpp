#pragma once

#include "actors/actors.hpp"
#include "actors/step_driver.hpp"

#include <caf/stateful_actor.hpp>

#include <optional>

namespace smp {

struct pipeline_scheduler_state : driver_output {
  static inline const char* name = "smp.pipeline-scheduler";

  using pointer
    = pipeline_scheduler_actor::stateful_pointer<pipeline_scheduler_state>;

  explicit pipeline_scheduler_state(pointer self) : self(self) {
    // nop
  }

  void start(request x) override;
  void grant(response x) override;
  void microbatch_over(const microbatch_done& x) override;
  void failed(const step_failed& x) override;
  void step_over(step_report x) override;

  pointer self;
  module_server_actor server;
  std::optional<step_driver> driver;
};

pipeline_scheduler_actor::behavior_type
pipeline_scheduler(pipeline_scheduler_state::pointer self, rank_id rank,
                   module_server_actor server, schedule_factory make);

} // namespace smp
