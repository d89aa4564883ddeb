#include "apps/smp-top/poller.hpp"

#include "transport/error.hpp"

#include <algorithm>
#include <exception>
#include <utility>

namespace smp::app {

poller::poller(run_source& source, std::chrono::milliseconds interval,
               run_look first)
  : source_(source), interval_(interval) {
  thread_ = std::thread{
    [this, x = std::move(first)]() mutable { run(std::move(x)); }};
}

poller::~poller() {
  {
    std::lock_guard guard{mutex_};
    stopping_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

std::optional<poller::result> poller::news() {
  std::lock_guard guard{mutex_};
  return std::exchange(news_, std::nullopt);
}

void poller::run(run_look first) {
  auto next = std::chrono::steady_clock::now();
  publish(std::move(first));
  for (;;) {
    next += interval_;
    {
      std::unique_lock guard{mutex_};
      changed_.wait_until(guard, next, [this] { return stopping_; });
      if (stopping_)
        return;
    }
    run_look x;
    try {
      x = source_.look();
    } catch (const std::exception& e) {
      x.text = e.what();
    }
    publish(std::move(x));
    // One look at a time: missed intervals are not made up for.
    next = std::max(next, std::chrono::steady_clock::now() - interval_);
  }
}

void poller::publish(run_look x) {
  auto rows = rows_.add(x, std::chrono::steady_clock::now());
  // A rank that is stopped answers nothing, and is to be seen at once.
  const bool answers = x.status
                       && std::ranges::all_of(
                         x.status->ranks, [](auto y) { return is_well(y); },
                         &rank_entry::health);
  {
    std::lock_guard guard{mutex_};
    news_ = result{x, rows, events_};
  }
  if (!answers)
    return;
  try {
    events_ = source_.recent_events(x);
  } catch (const std::exception&) {
    return; // the next look tells why the run does not answer
  }
  std::lock_guard guard{mutex_};
  news_ = result{std::move(x), std::move(rows), events_};
}

} // namespace smp::app
