// Parked threads deliver what arrives, which saves a wake-up if it is for them.

#include "transport/refuse_waits.hpp"
#include "transport/ucx/engine.hpp"

#include <poll.h>

namespace smp {

namespace {

/// Turns after which a worker that always has more to do is left to the
/// progress thread.
constexpr unsigned turns_limit = 8;

} // namespace

void ucx_fabric::engine::park(pollable_wake_up& x) {
  if (x.try_wait())
    return;
  // A message should wake one thread, not all idle ones.
  if (polled_.exchange(true))
    return x.wait();
  auto notified = false;
  while (!notified && poll(x))
    notified = x.try_wait();
  polled_ = false;
  ++polls_ended_;
  if (must_hand_over_)
    wake();
  if (!notified)
    x.wait();
}

bool ucx_fabric::engine::spin(const pollable_wake_up& x) {
  {
    worker_lock lock{worker_mutex_};
    refused_waits delivering{"a thread that delivers messages"};
    auto last = clock::now();
    do {
      if (!worker_ || closing_)
        return false;
      if (turn(lock))
        last = clock::now();
    } while (!x.is_notified() && spins(lock, last));
  }
  // Sleeping threads must be woken by what arrives from now on.
  return help();
}

bool ucx_fabric::engine::poll(pollable_wake_up& x) {
  if (options_.spin.count() > 0 && !spin(x))
    return false;
  std::array<pollfd, 2> ready{
    {{events_.get(), POLLIN, 0}, {x.fd(), POLLIN, 0}}};
  ::poll(ready.data(), ready.size(), -1);
  return ready[0].revents == 0 || help();
}

bool ucx_fabric::engine::help() {
  bool quiet = false;
  bool must_wake = false;
  {
    worker_lock lock{worker_mutex_};
    refused_waits delivering{"a thread that delivers messages"};
    for (unsigned i = 0; i < turns_limit && !quiet; ++i) {
      if (!worker_ || closing_)
        return false;
      turn(lock);
      // Sleeping threads must be woken by what arrives from now on.
      quiet = worker_ && !closing_ && !has_failed()
              && ucp_worker_arm(worker_->get()) == UCS_OK;
    }
    must_wake = asleep_ && !quiet;
  }
  if (must_wake)
    wake();
  if (!queue_is_empty())
    post_from_here();
  return quiet;
}

} // namespace smp
