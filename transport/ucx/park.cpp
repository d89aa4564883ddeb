// Threads that park deliver what comes: a wake-up less where it is for them.

#include "transport/refuse_waits.hpp"
#include "transport/ucx/engine.hpp"

#include <poll.h>

namespace smp {

void ucx_fabric::engine::park(pollable_wake_up& x) {
  while (!x.try_wait()) {
    // A message should wake one thread, not all that have nothing to do.
    auto watches = !watched_.exchange(true) && watch(x);
    if (!watches)
      return x.wait();
  }
}

bool ucx_fabric::engine::watch(pollable_wake_up& x) {
  std::array<pollfd, 2> ready{
    {{watched_events_.get(), POLLIN, 0}, {x.fd(), POLLIN, 0}}};
  ::poll(ready.data(), ready.size(), -1);
  auto again = ready[0].revents == 0 || help();
  watched_ = false;
  return again;
}

bool ucx_fabric::engine::help() {
  bool quiet = false;
  bool must_wake = false;
  {
    worker_lock lock{worker_mutex_, std::try_to_lock};
    // The progress thread woke up as well; it may have been faster.
    if (!lock || !worker_ || closing_ || telling_)
      return false;
    refused_waits delivering{"a thread that delivers messages"};
    turn(lock);
    if (closing_)
      return false;
    // Whoever sleeps must be woken by what comes from now on.
    quiet = failed_.empty() && ucp_worker_arm(worker_->get()) == UCS_OK;
    must_wake = asleep_ && !quiet;
  }
  if (must_wake)
    wake();
  if (!queue_is_empty())
    post_from_here();
  return quiet;
}

} // namespace smp
