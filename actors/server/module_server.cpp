#include "actors/server/module_server.hpp"

#include "actors/board/rank_board.hpp"
#include "actors/protocol/actor_scheduler.hpp"
#include "actors/protocol/plain_text.hpp"
#include "actors/protocol/server_handle.hpp"
#include "actors/protocol/wire.hpp"
#include "actors/schedule/pipeline_scheduler.hpp"
#include "actors/schedule/user_schedule.hpp"

#include <caf/sec.hpp>
#include <caf/send.hpp>

#include <algorithm>
#include <exception>
#include <string>
#include <utility>
#include <variant>

namespace smp {

module_server_state::module_server_state(pointer self)
  : self(self), door(std::make_shared<server_door>(module_server_actor{self})) {
  // nop
}

module_server_state::~module_server_state() {
  door->close();
  for (auto& [id, x] : contexts)
    caf::anon_send_exit(x, caf::exit_reason::kill);
  if (scheduler)
    caf::anon_send_exit(scheduler, caf::exit_reason::kill);
}

// -- what the core wants ------------------------------------------------------

std::shared_ptr<executor> module_server_state::make_context(context_id ctx) {
  auto result = options.services->make_executor();
  result->attach(
    ctx,
    std::make_shared<server_handle>(server_handle{module_server_actor{self}}),
    &options.board->record());
  // The board may outlive the context.
  options.board->add(ctx, [code = std::weak_ptr{result}] {
    auto x = code.lock();
    return x ? x->look() : context_view{};
  });
  contexts[ctx] = self->spawn<caf::monitored>(worker_context, result);
  return result;
}

void module_server_state::crashed(context_id ctx,
                                  const std::exception_ptr& why) {
  self->send_exit(contexts.at(ctx), error_of_exception(why));
}

fabric::sent_callback module_server_state::on_asked(request_id id) {
  return [door = door, id](const failure& e) {
    if (e)
      door->send(completed{id, e});
  };
}

fabric::sent_callback module_server_state::on_answered(request_id id) {
  return [door = door, id](const failure& e) {
    if (e && e.code != error_code::rank_down)
      door->send(undelivered{id, e});
  };
}

void module_server_state::body_over(response x) {
  if (scheduler)
    self->send(scheduler, std::move(x));
}

void module_server_state::forward_done(const smp::forward_done& x) {
  // The SCHEDULER sends grants before its reply. If it died, it grants nothing.
  self->request(scheduler, caf::infinite, x)
    .then([this, id = x.id] { core->decided(id); },
          [this, id = x.id](const caf::error&) { core->decided(id); });
}

void module_server_state::run(const scheduled_step& x) {
  self->send(scheduler, x);
}

void module_server_state::planned(const step_plan& x) {
  broadcast(x);
}

void module_server_state::diverged(const step_diverged& x) {
  if (!scheduler) {
    options.fabric->send(options.pipeline.front(), encode(x));
    return;
  }
  self->send(scheduler, x);
  broadcast(x);
  tell_tied(x);
}

void module_server_state::failed(const step_failed& x) {
  options.services->step_failed(x.step, x.error);
  if (!scheduler)
    return;
  self->send(scheduler, x);
  broadcast(x);
  tell_tied(x);
}

void module_server_state::report_done(request_id id, const completion_ptr& x) {
  // The completion owns the callback, so that must not own the completion.
  x->on_done([door = door, id, done = x.get()] {
    door->send(completed{id, done->cause()});
  });
}

bool module_server_state::gather(const request& x) {
  auto done = options.services->gather(x);
  if (!done || (done->done() && !done->cause()))
    return true;
  report_done(x.id, done);
  return false;
}

void module_server_state::forward_over(const smp::forward_over& x) {
  options.services->forward_over(x.step, x.start_number);
}

void module_server_state::microbatch_over(const microbatch_done& x) {
  options.services->microbatch_over(x.step, x.microbatch);
}

void module_server_state::activity(bool busy) {
  auto& schedule = options.schedule_actor;
  if (!schedule || !core->in_step())
    return;
  auto& ranks = options.pipeline;
  auto pp_rank = std::find(ranks.begin(), ranks.end(), core->self())
                 - ranks.begin();
  uint64_t memory = schedule->memory_in_use ? schedule->memory_in_use() : 0;
  rank_report x{core->step(),
                {static_cast<uint32_t>(pp_rank), busy,
                 memory - std::min(memory, memory_at_begin)}};
  if (scheduler)
    self->send(scheduler, x);
  else if (pp_rank > 0)
    options.fabric->send(ranks.front(), encode(x));
}

void module_server_state::step_over(step_report x) {
  options.services->step_over(x.step);
  on_report(std::move(x));
}

// -- events -------------------------------------------------------------------

void module_server_state::enter(const run_step& x) {
  if (auto& schedule = options.schedule_actor;
      schedule && schedule->memory_in_use)
    memory_at_begin = schedule->memory_in_use();
  try {
    core->enter(x);
  } catch (const error& e) {
    on_report({x.step, {}, e.cause()});
  }
}

void module_server_state::take(rank_id from, message x) {
  incoming what;
  try {
    what = decode(std::move(x));
    std::visit([&](auto& y) { check_sender(from, y); }, what);
  } catch (const error& e) {
    auto cause = e.cause();
    cause.rank = from;
    // This closes its endpoint, so that rank learns of its end as well.
    options.fabric->peer_lost(cause);
    return core->rank_down(cause);
  }
  std::visit([this](auto& y) { handle(y); }, what);
}

void module_server_state::handle(request& x) {
  core->receive(std::move(x));
}

void module_server_state::handle(response& x) {
  core->receive(std::move(x));
}

void module_server_state::handle(const rank_report& x) {
  if (scheduler)
    self->send(scheduler, x);
}

void module_server_state::handle(const step_plan& x) {
  core->plan(x);
}

void module_server_state::handle(const step_diverged& x) {
  core->diverge(x);
}

void module_server_state::handle(const step_failed& x) {
  core->fail_step(x);
}

void module_server_state::handle(const smp::forward_over& x) {
  if (scheduler && (core->keeps_order() || options.tells_forwards))
    broadcast(x);
  core->end_forward(x);
}

void module_server_state::handle(const microbatch_done& x) {
  if (scheduler)
    broadcast(x);
  core->end_microbatch(x);
}

void module_server_state::handle(step_report& x) {
  if (scheduler)
    broadcast(x);
  core->end_step(std::move(x));
  settle();
}

void module_server_state::on_down(const caf::down_msg& x) {
  if (scheduler && scheduler.address() == x.source) {
    scheduler = nullptr;
    auto err = failure{error_code::internal,
                       core->self(),
                       {},
                       "the PIPELINE SCHEDULER died: " + plain_text(x.reason)};
    if (!closing) {
      auto report = step_report{core->step(), {}, err};
      broadcast(report);
      core->end_step(std::move(report));
    }
  }
  auto is_source = [&](auto& y) { return y.second.address() == x.source; };
  if (auto i = std::find_if(contexts.begin(), contexts.end(), is_source);
      i != contexts.end()) {
    auto id = i->first;
    contexts.erase(i);
    core->lose(id, plain_text(x.reason));
  }
  settle();
}

void module_server_state::on_exit(const caf::exit_msg& x) {
  closing = true;
  reason = x.reason;
  if (scheduler)
    self->send_exit(scheduler, reason);
  core->shut_down();
  settle();
}

// The default handler would end this actor, and the rank with it.
void module_server_state::on_refused(const std::string& why) {
  core->fail_step({core->step(),
                   {error_code::internal,
                    core->self(),
                    {},
                    "a message was refused: " + why}});
}

void module_server_state::settle() {
  if (!closing || core->num_busy() > 0)
    return;
  // No executor thread executes any more, so joining them is fast.
  for (auto& [id, x] : contexts)
    self->send_exit(x, reason);
  if (contexts.empty() && !scheduler)
    self->quit(reason);
}

// -- helpers ------------------------------------------------------------------

template <class T>
void module_server_state::check_sender(rank_id from, const T& x) const {
  auto refuse = [](const char* why) -> void {
    throw error{error_code::protocol, why};
  };
  auto leader = options.pipeline.front();
  auto leads = core->self() == leader;
  if constexpr (std::is_same_v<T, request>) {
    if (x.id.origin != from)
      refuse("malformed request: origin is not the sender");
  } else if constexpr (std::is_same_v<T, response>) {
    if (x.id.origin != core->self())
      refuse("malformed response: origin is another rank");
  } else if constexpr (std::is_same_v<T, rank_report>) {
    if (!leads)
      refuse("malformed control message: only pp_rank 0 may get one");
  } else if constexpr (std::is_same_v<T, step_diverged>) {
    if (from != leader && !leads)
      refuse("malformed control message: from or to pp_rank 0 only");
  } else if constexpr (std::is_same_v<T, step_failed>) {
    // Between pipelines that share modules, the pp_rank 0 of one tells the
    // pp_rank 0 of the other.
    if (leads ? std::ranges::count(options.tied, from) == 0 : from != leader)
      refuse("malformed control message: only pp_rank 0 may send one");
  } else if (from != leader || leads) {
    refuse("malformed control message: only pp_rank 0 may send one");
  }
}

template <class T>
void module_server_state::broadcast(const T& x) {
  for (auto rank : options.pipeline)
    if (rank != core->self())
      options.fabric->send(rank, encode(x));
}

template <class T>
void module_server_state::tell_tied(const T& x) {
  for (auto rank : options.tied)
    options.fabric->send(rank, encode(x));
}

server_status module_server_state::status() const {
  server_status result;
  result.rank = core->self();
  result.step = core->step();
  result.in_step = core->in_step();
  result.ready = core->num_ready();
  result.in_line = core->in_line();
  result.later = core->num_later();
  result.held = core->num_held();
  result.blocked = core->num_blocked();
  result.dropped = core->num_dropped();
  result.unknown = core->num_unknown();
  result.pending = core->num_pending();
  core->each_queued(
    [&](const request& x, const char* why, bool incomplete, bool later) {
      result.queue.push_back(
        {x.id, x.microbatch, x.module, x.what, why,
         incomplete ? options.services->awaited_by(x) : no_rank, later});
    });
  for (auto& [id, x] : contexts)
    result.contexts.push_back(x);
  result.scheduler = scheduler;
  return result;
}

// -- behavior -----------------------------------------------------------------

void module_server_state::init(server_options x,
                               std::function<void(step_report)> f) {
  options = std::move(x);
  on_report = std::move(f);
  if (!options.board)
    options.board = std::make_shared<rank_board>(options.self, 0);
  auto leader = options.pipeline.front() == options.self;
  if (options.sequencer)
    options.sequencer->on_moved([door = door] { door->send(moved_atom_v); });
  core.emplace(
    server_core::options{
      .self = options.self,
      .leader = leader,
      .fabric = *options.fabric,
      .services = *options.services,
      .board = *options.board,
      .token = options.token,
      .on_token = [door = door] { door->send(token_atom_v); },
      .sequencer = options.sequencer,
      .launch_ahead = options.launch_ahead,
      .records = options.records,
    },
    *this);
  if (leader)
    scheduler = self->spawn<caf::monitored>(
      pipeline_scheduler, options.self, module_server_actor{self},
      options.services, options.schedule_actor);
}

module_server_actor::behavior_type
module_server(module_server_state::pointer self, server_options options,
              std::function<void(step_report)> on_report) {
  self->state.init(std::move(options), std::move(on_report));
  self->set_down_handler(
    [self](const caf::down_msg& x) { self->state.on_down(x); });
  self->set_exit_handler(
    [self](const caf::exit_msg& x) { self->state.on_exit(x); });
  self->set_error_handler(
    [self](const caf::error& x) { self->state.on_refused(plain_text(x)); });
  self->set_exception_handler(
    [](std::exception_ptr& x) { return error_of_exception(x); });
  return {
    [self](rank_id from, message& x) { self->state.take(from, std::move(x)); },
    [self](const run_step& x) { self->state.enter(x); },
    [self](const step_plan& x) { self->state.handle(x); },
    [self](const step_diverged& x) { self->state.handle(x); },
    [self](request& x) { self->state.handle(x); },
    [self](response& x) { self->state.handle(x); },
    [self](const completed& x) { self->state.core->complete(x); },
    [self](const undelivered& x) { self->state.core->answer_undelivered(x); },
    [self](const forward_over& x) { self->state.handle(x); },
    [self](moved_atom) { self->state.core->turns_moved(); },
    [self](const microbatch_done& x) { self->state.handle(x); },
    [self](const step_failed& x) { self->state.handle(x); },
    [self](step_report& x) { self->state.handle(x); },
    [self](const rank_report& x) { self->state.handle(x); },
    [self](down_atom, const failure& x) { self->state.core->rank_down(x); },
    [self](token_atom) { self->state.core->token_granted(); },
    [self](reached_atom) { self->state.core->reached(); },
    [self](asked& x) { self->state.core->issue(x.context, std::move(x.what)); },
    [self](suspended& x) {
      self->state.core->suspend(x.context, std::move(x.what));
    },
    [self](finished& x) {
      self->state.core->finish(x.context, std::move(x.result));
      self->state.settle();
    },
    [self](status_atom) { return self->state.status(); },
  };
}

} // namespace smp
