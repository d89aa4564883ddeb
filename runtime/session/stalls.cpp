// How a rank reports stalls and reacts to them.

#include "runtime/session/stalls.hpp"

#include "runtime/base/print_stderr.hpp"
#include "runtime/collectives/parking_waiter.hpp"
#include "runtime/device/rank_device.hpp"
#include "runtime/process/shared_flights.hpp"
#include "runtime/session/rank_runtime.hpp"
#include "runtime/session/session.hpp"
#include "transport/bytes.hpp"
#include "transport/stacks/process_stacks.hpp"

#include <utility>

namespace smp {

namespace {

/// Timeout for the replies of a rank's actors; a STALL MONITOR waits longer.
constexpr std::chrono::milliseconds answer_limit{300};

} // namespace

namespace {

/// A client's trace of a rank; one at a time.
constexpr std::chrono::seconds trace_life{60};

std::string text_of(const std::vector<std::byte>& x) {
  return {reinterpret_cast<const char*>(x.data()), x.size()};
}

/// @param trace the one that was begun last
std::string answer(const flight_query& x, rank_id self, flight_record& record,
                   std::shared_ptr<flight_trace>& trace) {
  switch (x.what) {
    case flight_query::kind::last:
      return text_of(record.image(x.limit));
    case flight_query::kind::begin_trace:
      trace = record.trace(x.limit, trace_life);
      return {};
    case flight_query::kind::finish_trace:
      break;
    case flight_query::kind::stacks: {
      auto stacks = stacks_of_this_process();
      stacks.rank = self;
      byte_writer out;
      out.put(stacks);
      return text_of(out.take());
    }
  }
  auto ended = std::exchange(trace, nullptr);
  return ended ? text_of(record.image(ended->take(), ended->lost()))
               : std::string{};
}

} // namespace

std::weak_ptr<rank_runtime> weak_from(rank_runtime& x) {
  return std::static_pointer_cast<rank_runtime>(x.shared_from_this());
}

stall_options stalls_of(const session_config& x) {
  return {x.stall_timeout, x.on_stall == "end"};
}

void on_stall(session& s, stall_listener f) {
  s.internals().on_stall(std::move(f));
}

void rank_runtime::attach_main_thread() {
  if (launches_)
    launches_->enter_thread();
  {
    auto& parking = parking_waiter::of_thread();
    parking.attach(fabric_.get());
    scoped_waiter beneath{parking};
    noting_.emplace(*board_);
  }
  installed_.emplace(*noting_);
}

void rank_runtime::detach_main_thread() {
  if (launches_)
    launches_->leave_thread();
  installed_.reset();
  noting_.reset();
  parking_waiter::of_thread().attach(nullptr);
}

void rank_runtime::on_stall(stall_listener f) {
  std::unique_lock guard{mutex_};
  on_stall_ = std::move(f);
}

watched_rank rank_runtime::watch() {
  watched_rank result;
  result.look = [board = own_board_] { return board->look(); };
  result.view = [weak = weak_from(*this), board = own_board_] {
    auto eng = weak.lock();
    return eng ? eng->view(answer_limit) : board->view();
  };
  result.status = [weak = weak_from(*this), board = own_board_] {
    if (auto eng = weak.lock())
      return eng->status();
    rank_status ended;
    ended.view = board->view();
    return ended;
  };
  result.flight = [self = self_, board = own_board_,
                   trace = std::make_shared<std::shared_ptr<flight_trace>>()](
                    const flight_query& x) {
    return answer(x, self, board->record(), *trace);
  };
  result.report = [weak = weak_from(*this)](const std::string& x) {
    if (auto eng = weak.lock())
      eng->report_stall(x, false);
  };
  result.end = [weak = weak_from(*this)](const failure& x) {
    if (auto eng = weak.lock())
      eng->end_stalled(x);
  };
  result.fail_step = [weak = weak_from(*this)](step_id step, const failure& x) {
    if (auto eng = weak.lock())
      eng->own_collectives_.step_failed(step, x);
  };
  return result;
}

rank_view rank_runtime::view(std::chrono::milliseconds limit) {
  auto result = board_->view();
  result.step = step();
  result.left = result.left || leaving_;
  result.refused = fabric_->stats().messages_refused;
  if (own_collectives_.busy()) {
    activity sums;
    sums.who = activity::kind::schedule;
    sums.executes = true;
    sums.what = "thread that sums tensors of collectives works";
    result.activities.push_back(std::move(sums));
  }
  for (auto& x : result.peers)
    x.queued = fabric_->queued_to(x.peer);
  if (std::shared_lock guard{node_mutex_}; node_)
    node_->complete(result, limit);
  if (tensor_peers_ && result.settled) {
    result.sharers = own_layout_.members(comm_group::tp, self_);
    result.shared = own_tensor_peers_.calls(result.step);
  }
  return result;
}

void rank_runtime::report_stall(const std::string& text, bool ends) {
  // On rank 0, the user's thread reports the end.
  if (prints_stalls_ && !(ends && self_ == rank_id{0}))
    print_stderr("smp: {}\n", text);
  leave_record();
  stall_listener f;
  {
    std::unique_lock guard{mutex_};
    f = on_stall_;
  }
  if (f)
    f(text, ends);
}

void rank_runtime::leave_record_in(std::string dir) {
  std::unique_lock guard{mutex_};
  record_dir_ = std::move(dir);
}

void rank_runtime::leave_record() {
  std::unique_lock guard{mutex_};
  auto dir = record_dir_;
  guard.unlock();
  if (dir.empty())
    return;
  auto why = write_flight(dir, self_, own_board_->record().image());
  if (!why.empty())
    print_stderr("smp: rank {}: cannot write what it did last: {}\n",
                 self_.value, why);
}

void rank_runtime::end_stalled(const failure& x) {
  {
    std::unique_lock guard{mutex_};
    if (!down_)
      down_ = x;
  }
  report_stall(x.text, true);
  for (auto rank : own_layout_.members(comm_group::world, self_)) {
    own_exchange_.fail(rank, x);
    own_collectives_.fail(rank, x);
    own_objects_.fail(rank, x);
  }
  if (std::shared_lock guard{node_mutex_}; node_)
    node_->rank_down(x);
}

} // namespace smp
