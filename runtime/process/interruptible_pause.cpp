#include "runtime/process/interruptible_pause.hpp"

#include "runtime/process/process.hpp"

#include <csignal>

namespace smp {

interruptible_pause::interruptible_pause() {
  for (int number : {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2})
    if (!is_ignored(number))
      signals_.add(number);
}

bool interruptible_pause::wait(std::chrono::milliseconds x) {
  await_signal();
  timer_.expires_after(x);
  timer_.async_wait([this](boost::system::error_code) { signals_.cancel(); });
  io_.restart();
  io_.run();
  return !interrupted_;
}

void interruptible_pause::await_signal() {
  signals_.async_wait([this](boost::system::error_code over, int number) {
    if (over)
      return;
    // Nobody is there who could save anything.
    if (number == SIGQUIT || number == SIGUSR1 || number == SIGUSR2)
      return await_signal();
    interrupted_ = true;
    timer_.cancel();
  });
}

} // namespace smp
