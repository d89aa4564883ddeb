#include "actors/server/executor.hpp"

#include "actors/protocol/actor_scheduler.hpp"
#include "actors/protocol/server_handle.hpp"

#include <caf/send.hpp>

#include <string>
#include <utility>

namespace smp {

executor::executor() = default;

executor::~executor() = default;

// -- MODULE SERVER ------------------------------------------------------------

void executor::attach(context_id id,
                      std::shared_ptr<const server_handle> server,
                      flight_record* record) {
  id_ = id;
  server_ = std::move(server);
  record_ = record;
}

failure executor::start(request x) {
  {
    std::lock_guard guard{mutex_};
    if (closing_ || !move(context_state::idle, context_state::executing))
      return refusal();
    auto& y = view_.current = {};
    y.id = x.id;
    y.step = x.step;
    y.microbatch = x.microbatch;
    y.module = x.module;
    y.what = x.what;
    view_.slot = std::make_shared<call_slot>();
  }
  request_ = std::move(x);
  wake();
  return {};
}

failure executor::resume(response x) {
  {
    std::lock_guard guard{mutex_};
    if (closing_ || !move(context_state::pending, context_state::executing))
      return refusal();
    view_.waits_for = {};
  }
  response_ = std::move(x);
  wake();
  return {};
}

void executor::close() {
  if (closing_.exchange(true))
    return;
  join();
  // No handle of an actor may outlive the actors.
  std::lock_guard guard{mutex_};
  server_ = nullptr;
}

// -- anybody ------------------------------------------------------------------

context_view executor::look() const {
  std::lock_guard guard{mutex_};
  return view_;
}

call_slot* executor::slot() const {
  std::lock_guard guard{mutex_};
  return view_.slot.get();
}

std::function<void()> executor::teller_of_reached() const {
  return [weak = std::weak_ptr{server_}] {
    if (auto server = weak.lock())
      caf::anon_send(server->actor, reached_atom_v);
  };
}

// -- the execution ------------------------------------------------------------

response executor::park(call x) {
  begin_call(x.kind, x.kind == call_kind::remote ? x.owner : x.why.from);
  note(flight_kind::parked, &x);
  switch_out();
  leave(std::move(x));
  pause();
  note(flight_kind::resumed);
  auto result = take_response();
  switch_in(result.error);
  return result;
}

void executor::send(call x) {
  begin_call(x.kind, std::nullopt);
  if (std::lock_guard guard{mutex_}; view_.state != context_state::executing)
    return give_up();
  tell(asked{id_, std::move(x)});
}

void executor::leave(call x) {
  {
    std::lock_guard guard{mutex_};
    if (!move(context_state::executing, context_state::pending))
      return give_up();
    view_.waits_for = {x.kind, x.owner, x.module, x.what, x.why, x.done};
    // The step body has reached the end of its forward phase.
    if (x.kind == call_kind::grant)
      view_.current.what = phase::backward;
  }
  run_here parked;
  tell(suspended{id_, std::move(x)});
}

void executor::finish(outcome x) {
  {
    std::lock_guard guard{mutex_};
    if (!move(context_state::executing, context_state::idle))
      return give_up();
    ++view_.served;
    view_.slot = nullptr;
  }
  note(flight_kind::ended);
  run_here idle;
  tell(finished{id_, std::move(x)});
}

// -- helpers ------------------------------------------------------------------

// Only the thread of the execution changes `view_.current` while it runs.
void executor::note(flight_kind kind, const call* waits_for) const {
  if (record_ == nullptr)
    return;
  auto& current = view_.current;
  flight_event x;
  x.kind = kind;
  x.number = current.id.number;
  x.origin = static_cast<uint32_t>(current.id.origin.value);
  x.step = static_cast<uint32_t>(current.step.value);
  x.microbatch = static_cast<uint32_t>(current.microbatch.value);
  x.what = current.what;
  x.name = static_cast<uint32_t>(current.module.value);
  x.context = static_cast<uint32_t>(id_.value);
  if (waits_for != nullptr) {
    auto& y = *waits_for;
    auto asks = y.kind == call_kind::remote;
    x.what = y.what;
    x.name = asks ? static_cast<uint32_t>(y.module.value)
             : y.kind == call_kind::grant
               ? record_->name("the grant of the backward phase")
               : record_->name(y.why);
    if (auto from = asks ? std::optional{y.owner} : y.why.from)
      x.peer = static_cast<uint32_t>(from->value);
  }
  record_->note(x);
}

// @pre holds mutex_
bool executor::move(context_state from, context_state to) {
  if (view_.state != from)
    return false;
  view_.state = to;
  // That of the actors, which tests advance.
  view_.since = server_ ? server_->actor->home_system().clock().now()
                        : context_view::clock::now();
  return true;
}

// @pre holds mutex_
failure executor::refusal() const {
  return {error_code::internal,
          no_rank,
          {},
          std::string{"the WORKER CONTEXT is "} + to_string(view_.state)};
}

// An execution whose events contradict its state is a defect.
// @pre holds mutex_
void executor::give_up() {
  tell(step_failed{view_.current.step, refusal()});
}

template <class T>
void executor::tell(T x) {
  if (server_)
    caf::anon_send(server_->actor, std::move(x));
}

} // namespace smp
