#include "actors/board/context_notes.hpp"

namespace smp {

bool context_notes::move(context_state from, context_state to,
                         clock::time_point now) {
  if (view_.state != from)
    return false;
  view_.state = to;
  view_.since = now;
  return true;
}

bool context_notes::start(const request& x, clock::time_point now) {
  std::lock_guard guard{mutex_};
  if (!move(context_state::idle, context_state::executing, now))
    return false;
  auto& y = view_.current = {};
  y.id = x.id;
  y.step = x.step;
  y.microbatch = x.microbatch;
  y.module = x.module;
  y.what = x.what;
  view_.slot = std::make_shared<call_slot>();
  return true;
}

bool context_notes::park(const call& x, clock::time_point now) {
  std::lock_guard guard{mutex_};
  if (!move(context_state::executing, context_state::pending, now))
    return false;
  view_.waits_for = {x.kind, x.owner, x.module, x.what, x.why, x.done};
  // The step body has reached the end of its forward phase.
  if (x.kind == call_kind::grant)
    view_.current.what = phase::backward;
  return true;
}

bool context_notes::resume(clock::time_point now) {
  std::lock_guard guard{mutex_};
  if (!move(context_state::pending, context_state::executing, now))
    return false;
  view_.waits_for = {};
  return true;
}

bool context_notes::finish(clock::time_point now) {
  std::lock_guard guard{mutex_};
  if (!move(context_state::executing, context_state::idle, now))
    return false;
  ++view_.served;
  view_.slot = nullptr;
  return true;
}

context_state context_notes::state() const {
  std::lock_guard guard{mutex_};
  return view_.state;
}

context_notes::view context_notes::look() const {
  std::lock_guard guard{mutex_};
  return view_;
}

} // namespace smp
