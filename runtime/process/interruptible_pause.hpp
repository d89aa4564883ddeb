#pragma once

// The time between processes, in which the user may still interrupt.

#include <boost/asio/io_context.hpp>
#include <boost/asio/signal_set.hpp>
#include <boost/asio/steady_timer.hpp>

#include <chrono>

namespace smp {

/// Without it, a signal that comes when no process is left to pass it on to
/// would end this one, or be lost. Takes what comes from now on, also while
/// somebody else handles signals.
class interruptible_pause {
public:
  interruptible_pause();

  /// @returns false, at once, if SIGINT, SIGTERM or SIGHUP comes or has come
  bool wait(std::chrono::milliseconds x);

  /// Whether such a signal has come in a wait.
  bool interrupted() const noexcept {
    return interrupted_;
  }

private:
  void await_signal();

  boost::asio::io_context io_;
  boost::asio::signal_set signals_{io_};
  boost::asio::steady_timer timer_{io_};
  bool interrupted_ = false;
};

} // namespace smp
