#include "actors/server/worker_context.hpp"

#include "actors/protocol/actor_scheduler.hpp"
#include "actors/protocol/plain_text.hpp"

#include <caf/sec.hpp>
#include <caf/send.hpp>

#include <chrono>
#include <string>
#include <utility>

namespace smp {

namespace {

std::string describe(const context_notes::awaited_call& x) {
  auto what = x.why.what;
  switch (x.kind) {
    case call_kind::grant:
      return "the grant of the backward phase";
    case call_kind::remote:
      if (what.empty())
        what = "module " + std::to_string(x.module.value);
      return what + " from rank " + std::to_string(x.owner.value);
    default:
      if (x.why.from)
        what += " from rank " + std::to_string(x.why.from->value);
      return what;
  }
}

} // namespace

// -- link ---------------------------------------------------------------------

context_link::context_link(std::shared_ptr<context_notes> notes,
                           module_server_actor server, rank_services& services)
  : notes_(std::move(notes)),
    server_(std::move(server)),
    exec_(services.make_executor(*this)) {
  // nop
}

caf::error context_link::start(request x) {
  std::lock_guard guard{mutex_};
  if (!exec_ || !notes_->start(x, now()))
    return refusal();
  exec_->start(std::move(x));
  return {};
}

caf::error context_link::resume(response x) {
  std::lock_guard guard{mutex_};
  if (!exec_ || !notes_->resume(now()))
    return refusal();
  exec_->resume(std::move(x));
  return {};
}

void context_link::close() {
  executor_ptr ending;
  std::lock_guard guard{mutex_};
  ending.swap(exec_);
}

void context_link::called(call x) {
  if (!notes_->park(x, now()))
    return give_up();
  run_here parked;
  tell(suspended{notes_->id(), std::move(x)});
}

void context_link::asked(call x) {
  if (notes_->state() != context_state::executing)
    return give_up();
  tell(smp::asked{notes_->id(), std::move(x)});
}

void context_link::returned(outcome x) {
  if (!notes_->finish(now()))
    return give_up();
  run_here idle;
  tell(finished{notes_->id(), std::move(x)});
}

caf::error context_link::refusal() const {
  return caf::make_error(caf::sec::unexpected_message,
                         std::string{"the WORKER CONTEXT is "}
                           + to_string(notes_->state()));
}

// An executor whose events contradict its notes is a defect.
void context_link::give_up() {
  tell(step_failed{notes_->look().current.step,
                   {error_code::internal, no_rank, {}, plain_text(refusal())}});
}

context_notes::clock::time_point context_link::now() const {
  return server_->home_system().clock().now();
}

template <class T>
void context_link::tell(T x) {
  caf::anon_send(server_, std::move(x));
}

// -- actor --------------------------------------------------------------------

worker_context_state::~worker_context_state() {
  if (link)
    link->close();
}

context_status worker_context_state::status() const {
  auto x = link->notes().look();
  context_status result;
  result.context = link->notes().id();
  result.state = x.state;
  result.current = x.current.id;
  result.microbatch = x.current.microbatch;
  result.module = x.current.module;
  result.what = x.current.what;
  if (x.state == context_state::pending)
    result.waits_for = describe(x.waits_for);
  using seconds = std::chrono::duration<double>;
  result.seconds = seconds{self->clock().now() - x.since}.count();
  result.served = x.served;
  return result;
}

worker_context_actor::behavior_type
worker_context(worker_context_state::pointer self,
               std::shared_ptr<context_link> link) {
  self->state.link = std::move(link);
  return {
    [self](status_atom) { return self->state.status(); },
  };
}

} // namespace smp
