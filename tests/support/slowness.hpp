#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <ctime>
#include <thread>

#include <poll.h>
#include <signal.h>

namespace smp::test {

/// How many times slower than a quiet one the machine is while this lives: a
/// thread computes for a millisecond, rests for ten, and notes how long both
/// take. What tests say of seconds is divided by that.
class slowness {
public:
  slowness() {
    // Signals are for the threads of the test.
    sigset_t all;
    sigset_t before;
    ::sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, &before);
    meter_ = std::thread{[this] { run(); }};
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  ~slowness() {
    done_ = true;
    meter_.join();
  }

  slowness(const slowness&) = delete;
  slowness& operator=(const slowness&) = delete;

  /// @returns at least 1, and 1 before the first millisecond is over
  double factor() const noexcept {
    return std::max(1.0, factor_.load());
  }

private:
  using clock = std::chrono::steady_clock;

  /// Of this thread.
  static double cpu_seconds() noexcept {
    timespec x{};
    ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &x);
    return static_cast<double>(x.tv_sec)
           + 1e-9 * static_cast<double>(x.tv_nsec);
  }

  void run() {
    auto begin = clock::now();
    for (double wanted = 0; !done_;) {
      for (auto cpu = cpu_seconds(); cpu_seconds() - cpu < 0.001;) {
        // compute
      }
      ::poll(nullptr, 0, 10);
      wanted += 0.0111; // a poll is a tenth of a millisecond late
      std::chrono::duration<double> passed = clock::now() - begin;
      factor_ = passed.count() / wanted;
    }
  }

  std::atomic<bool> done_ = false;
  std::atomic<double> factor_ = 1;
  std::thread meter_;
};

} // namespace smp::test
