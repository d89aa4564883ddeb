#include "actors/schedule/pipeline_scheduler.hpp"

#include "actors/schedule/schedule_errors.hpp"

#include <caf/send.hpp>

#include <utility>
#include <variant>

namespace smp {

pipeline_scheduler_state::~pipeline_scheduler_state() {
  dismiss();
}

// -- what the driver wants ----------------------------------------------------

void pipeline_scheduler_state::start(request x) {
  self->send(server, std::move(x));
}

void pipeline_scheduler_state::grant(response x) {
  self->send(server, std::move(x));
}

void pipeline_scheduler_state::forward_over(const smp::forward_over& x) {
  self->send(server, x);
}

void pipeline_scheduler_state::microbatch_over(const microbatch_done& x) {
  self->send(server, x);
}

void pipeline_scheduler_state::failed(const step_failed& x) {
  self->send(server, x);
}

void pipeline_scheduler_state::step_over(step_report x) {
  dialog = nullptr; // it ended with the step
  self->send(server, std::move(x));
}

// -- the user's actor ---------------------------------------------------------

schedule_ptr pipeline_scheduler_state::converse(step_id step,
                                                uint64_t microbatches) {
  if (!user_actor) {
    user_actor = user->type->spawn(
      self->system(), {user->options, user->partitions}, user->own_thread);
    self->monitor(user_actor);
  }
  auto result = std::make_unique<schedule_dialog>(
    user->type->name(),
    step_begins{step, microbatches, user->partitions,
                user->active(microbatches)},
    *this, questions);
  dialog = result.get();
  return result;
}

void pipeline_scheduler_state::ask(uint64_t number, const schedule_event& x) {
  questions = number + 1;
  asked_at = self->clock().now();
  auto put = [&](auto& y) {
    self->request(user_actor, user->timeout, y)
      .then([this, number](const schedule_answer& z) { answered(number, z); },
            [this, number](const caf::error& e) {
              if (!has_ended(e)) // else its down message tells why
                no_answer(number, e);
            });
  };
  std::visit(put, x);
}

void pipeline_scheduler_state::answered(uint64_t number,
                                        const schedule_answer& x) {
  if (!dialog)
    return;
  dialog->answered(number, x);
  if (dialog->broken())
    dismiss();
  driver->decided();
}

void pipeline_scheduler_state::no_answer(uint64_t number, const caf::error& e) {
  if (!dialog)
    return;
  auto [code, why] = explain(e, user->timeout);
  dialog->failed(number, code, why);
  if (dialog->broken())
    dismiss();
  driver->decided();
}

void pipeline_scheduler_state::dismiss() {
  if (user_actor)
    caf::anon_send_exit(user_actor, caf::exit_reason::kill);
  user_actor = nullptr;
}

scheduler_status pipeline_scheduler_state::status() const {
  scheduler_status result{
    driver->step(), driver->num_running(), driver->num_left(), {}, 0};
  if (auto event = dialog ? dialog->question() : std::nullopt) {
    result.asks = "schedule actor \"" + user->type->name()
                  + "\" owes an answer to event \"" + to_string(*event) + '"';
    using seconds = std::chrono::duration<double>;
    result.seconds = seconds{self->clock().now() - asked_at}.count();
  }
  return result;
}

// -- behavior -----------------------------------------------------------------

pipeline_scheduler_actor::behavior_type
pipeline_scheduler(pipeline_scheduler_state::pointer self, rank_id rank,
                   module_server_actor server, rank_services* services,
                   std::shared_ptr<const user_schedule> user) {
  auto& st = self->state;
  st.server = std::move(server);
  st.user = std::move(user);
  auto make = [&st, services](uint64_t microbatches) {
    return st.user ? st.converse(st.driver->step(), microbatches)
                   : services->make_schedule(microbatches);
  };
  st.driver.emplace(rank, make, st);
  self->set_down_handler([self](const caf::down_msg& x) {
    auto& st = self->state;
    if (!st.user_actor || st.user_actor.address() != x.source)
      return;
    st.user_actor = nullptr;
    if (st.questions > 0)
      st.no_answer(st.questions - 1, x.reason);
  });
  return {
    [self](const scheduled_step& x) { self->state.driver->run(x); },
    [self](const forward_done& x) { self->state.driver->forward_done(x); },
    [self](response& x) { self->state.driver->ended(std::move(x)); },
    [self](const step_failed& x) { self->state.driver->failed(x); },
    [self](const step_diverged& x) { self->state.driver->diverged(x); },
    [self](const rank_report& x) { self->state.driver->rank_changed(x); },
    [self](status_atom) { return self->state.status(); },
  };
}

} // namespace smp
