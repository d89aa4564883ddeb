#include "actors/pipeline_scheduler.hpp"

#include <utility>

namespace smp {

// -- what the driver wants ----------------------------------------------------

void pipeline_scheduler_state::start(request x) {
  self->send(server, std::move(x));
}

void pipeline_scheduler_state::grant(response x) {
  self->send(server, std::move(x));
}

void pipeline_scheduler_state::microbatch_over(const microbatch_done& x) {
  self->send(server, x);
}

void pipeline_scheduler_state::failed(const step_failed& x) {
  self->send(server, x);
}

void pipeline_scheduler_state::step_over(step_report x) {
  self->send(server, std::move(x));
}

// -- behavior -----------------------------------------------------------------

pipeline_scheduler_actor::behavior_type
pipeline_scheduler(pipeline_scheduler_state::pointer self, rank_id rank,
                   module_server_actor server, schedule_factory make) {
  auto& st = self->state;
  st.server = std::move(server);
  st.driver.emplace(rank, std::move(make), st);
  return {
    [self](const run_step& x) { self->state.driver->run(x); },
    [self](const forward_done& x) { self->state.driver->forward_done(x); },
    [self](response& x) { self->state.driver->ended(std::move(x)); },
    [self](const step_failed& x) { self->state.driver->failed(x); },
    [self](status_atom) {
      auto& driver = *self->state.driver;
      return scheduler_status{driver.step(), driver.num_running(),
                              driver.num_left()};
    },
  };
}

} // namespace smp
