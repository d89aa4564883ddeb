// How `server_core` handles requests that no caller waits for (R38, R39).

#include "actors/server/server_core.hpp"

#include <algorithm>
#include <utility>

namespace smp {

// -- who asks -----------------------------------------------------------------

request server_core::request_of(const context_entry& from, uint64_t number,
                                call& x) const {
  auto& cur = *from.current;
  request result{{self(), number}, cur.step,          cur.microbatch,  x.module,
                 x.what,           std::move(x.body), cur.start_number};
  result.promised = x.kind == call_kind::promise;
  result.needs = std::move(x.needs);
  result.released = std::move(x.released);
  // Even if that one is over by now, as this depends on timing (R33).
  if (auto i = from.promises.find(x.owner); i != from.promises.end())
    result.after = i->second;
  return result;
}

void server_core::issue(context_id ctx, call x) {
  auto pos = contexts_.find(ctx);
  auto refused = refusal(x);
  if (pos == contexts_.end() && !refused)
    refused = {
      error_code::internal, self(), {}, "a promise of a context that died"};
  if (!refused && following()) {
    auto& cur = *pos->second.current;
    if (auto how = replay_->call(cur.id, x).divergence; !how.empty())
      refused = leave_record(cur, how);
  }
  if (refused) {
    fail(refused);
    x.answer->fail(refused);
    return pump();
  }
  request_id id{self(), x.number};
  pending_.emplace(id, pending_call{ctx, x.kind, x.what, x.answer});
  if (recorder_)
    recorder_->called(pos->second.current->id, id, x);
  ask(ctx, x.owner, request_of(pos->second, x.number, x));
  pos->second.promises[x.owner] = x.number;
}

// -- who is asked -------------------------------------------------------------

bool server_core::is_over(rank_id origin, uint64_t number) const {
  return over_.contains({origin, number});
}

void server_core::unblock(std::vector<blocked_request>::iterator i) {
  if (i->behind || i->incomplete)
    return;
  auto x = std::move(i->what);
  blocked_.erase(i);
  admit(std::move(x));
}

bool server_core::complete_blocked(const completed& x) {
  auto i = std::find_if(blocked_.begin(), blocked_.end(), [&](auto& y) {
    return y.what.id == x.id && y.incomplete;
  });
  if (i == blocked_.end())
    return false;
  i->incomplete = false;
  if (x.error) {
    blocked_.erase(i);
    fail(x.error);
    reply({x.id, {}, x.error});
  } else {
    unblock(i);
  }
  return true;
}

void server_core::end_promised(request_id id) {
  over_.insert(id);
  auto next = std::find_if(blocked_.begin(), blocked_.end(), [&](auto& y) {
    return y.behind && y.what.id.origin == id.origin
           && y.what.after == id.number;
  });
  if (next == blocked_.end())
    return;
  next->behind = false;
  unblock(next);
}

} // namespace smp
