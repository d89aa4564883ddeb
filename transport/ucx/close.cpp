// How connections end: one by one when ranks are lost, all when it stops.

#include "transport/ucx/engine.hpp"
#include "transport/ucx/failures.hpp"

#include <algorithm>

namespace smp {

using namespace ucx;

namespace {

/// Time for an orderly end before it is forced.
constexpr std::chrono::seconds flush_limit{1};

/// Time for the goodbye to a rank that was given up. One that is alive takes it
/// within a millisecond, tcp between busy machines within some ten; one that
/// was killed never does, and what is in flight to it ends only after this.
constexpr std::chrono::milliseconds farewell_limit{200};

/// How long a rank that left may still send what it had begun: the most that
/// its own end takes.
constexpr std::chrono::seconds leave_limit = 2 * flush_limit;

} // namespace

// -- a lost rank --------------------------------------------------------------

void ucx_fabric::engine::on_endpoint_error(void* x, ucp_ep_h,
                                           ucs_status_t status) {
  auto& lost = *static_cast<peer*>(x);
  lost.self->guarded(lost, [&] {
    lost.self->failed_.emplace_back(
      &lost, failure_of(status, lost.rank, during::nothing));
  });
}

bool ucx_fabric::engine::has_failed() const {
  return !failed_.empty()
         || std::any_of(peers_.begin(), peers_.end(),
                        [](auto& x) { return x.starved; });
}

void ucx_fabric::engine::handle_failed() {
  for (auto& x : peers_)
    if (std::exchange(x.starved, false))
      refuse(x, error_code::transport,
             "no memory for what it sends: it is cut off");
  for (auto& [x, why] : std::exchange(failed_, {}))
    if (!closing_)
      lose(*x, why);
}

void ucx_fabric::engine::give_up(peer& x, const failure& why) {
  if (x.state == peer_state::connected) {
    x.state = peer_state::lost;
    x.why = why;
    if (!first_lost_)
      first_lost_ = x.rank;
    report(x);
  }
  drop_queued(x, x.why);
  x.partial.clear();
  x.partial_bytes = 0;
}

void ucx_fabric::engine::lose(peer& x, const failure& why) {
  give_up(x, why);
  close(x);
}

void ucx_fabric::engine::part_from(peer& x, const failure& why) {
  give_up(x, why);
  x.close_at = clock::now() + farewell_limit;
  say_goodbye(x);
}

void ucx_fabric::engine::left(peer& x, uint64_t because_of) {
  std::optional<rank_id> lost;
  if (because_of > 0 && because_of <= peers_.size())
    lost = rank_id{because_of - 1};
  x.state = peer_state::left;
  x.why = left_the_run(x.rank, lost);
  if (!first_lost_)
    first_lost_ = lost;
  // Shared memory accepts what is posted to a rank that has left, and reports
  // nothing while its process lives: what was posted before this was read.
  x.close_at = clock::now() + leave_limit;
}

void ucx_fabric::engine::close_in_time(peer& x) {
  if (x.close_at && clock::now() >= *x.close_at) {
    x.close_at.reset();
    close(x);
  }
}

void ucx_fabric::engine::report(peer& x) {
  // Messages that arrived before are still reported, but none after.
  if (!std::exchange(x.reported, true))
    news_.emplace_back(x.why);
}

void ucx_fabric::engine::close(peer& x) {
  if (x.endpoint == nullptr)
    return;
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS | UCP_OP_ATTR_FIELD_CALLBACK
                       | UCP_OP_ATTR_FIELD_USER_DATA;
  param.flags = UCP_EP_CLOSE_FLAG_FORCE;
  param.cb.send = on_closed;
  param.user_data = this;
  // Reports what was in flight as cancelled, now or in the next progress.
  auto request = ucp_ep_close_nbx(std::exchange(x.endpoint, nullptr), &param);
  if (UCS_PTR_IS_PTR(request))
    ++open_closes_;
}

void ucx_fabric::engine::on_closed(void* request, ucs_status_t, void* self) {
  ucp_request_free(request);
  --static_cast<engine*>(self)->open_closes_;
}

// -- the stop -----------------------------------------------------------------

failure ucx_fabric::engine::stopped() const {
  return {error_code::cancelled, self_, {}, "the fabric was stopped"};
}

void ucx_fabric::engine::say_goodbye(peer& to) {
  unit_header header;
  header.kind = unit_kind::goodbye;
  header.from = static_cast<uint32_t>(self_.value);
  if (first_lost_)
    header.number = first_lost_->value + 1;
  post(to, {nullptr, header, nullptr, 0}, false);
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
  param.cb.send = on_flushed;
  param.user_data = &to;
  auto request = ucp_ep_flush_nbx(to.endpoint, &param);
  if (UCS_PTR_IS_PTR(request))
    ++open_closes_;
  else
    flushed(to);
}

void ucx_fabric::engine::on_flushed(void* request, ucs_status_t, void* x) {
  ucp_request_free(request);
  auto& to = *static_cast<peer*>(x);
  --to.self->open_closes_;
  flushed(to);
}

void ucx_fabric::engine::flushed(peer& to) {
  if (to.close_at)
    to.close_at = clock::time_point{};
}

void ucx_fabric::engine::close_all(worker_lock& lock) {
  closing_ = true;
  told_.wait(lock, [&] { return !telling_; });
  take_queued_sends(); // cancels them
  for (auto& x : peers_)
    drop_queued(x, stopped());
  auto turn_until = [&](clock::time_point deadline, auto done) {
    while (!done() && clock::now() < deadline)
      if (!turn(lock))
        wait(lock);
  };
  for (auto& x : peers_)
    if (x.endpoint != nullptr && x.state == peer_state::connected)
      say_goodbye(x);
  turn_until(clock::now() + flush_limit, [&] { return open_closes_ == 0; });
  // A connection that is closed by force still calls back for open requests.
  for (auto& x : peers_)
    close(x);
  turn_until(clock::now() + flush_limit, [&] {
    return open_closes_ == 0 && open_sends_ == 0 && open_receives_ == 0;
  });
  turn(lock);
  worker_.reset();
}

} // namespace smp
