#include "transport/collectives/work_line.hpp"

#include "transport/refuse_waits.hpp"

#include <pthread.h>

#include <utility>

namespace smp {

namespace {

/// The most tasks of others that a thread runs when it adds a small one.
constexpr int most_here = 64;

} // namespace

void work_line::close() {
  {
    std::lock_guard guard{mutex_};
    ending_ = true;
    if (!thread_.joinable())
      return;
    wake_.notify();
  }
  thread_.join();
}

void work_line::add(task f, bool large) {
  {
    std::lock_guard guard{mutex_};
    if (ending_)
      return;
    ++open_;
    entries_.push_back({std::move(f), large});
    if (std::exchange(running_, true))
      return;
    if (large) {
      wake_thread();
      return;
    }
  }
  run_here();
}

void work_line::run_here() {
  for (int i = 0;; ++i) {
    entry next;
    {
      std::lock_guard guard{mutex_};
      if (entries_.empty()) {
        running_ = false;
        return;
      }
      if (entries_.front().large || i == most_here) {
        wake_thread();
        return;
      }
      next = std::move(entries_.front());
      entries_.pop_front();
    }
    next.f();
    next.f = nullptr;
    --open_;
  }
}

void work_line::wake_thread() {
  if (!thread_.joinable())
    thread_ = std::thread{[this] { run_large(); }};
  wake_.notify();
}

void work_line::run_large() {
  pthread_setname_np(pthread_self(), "smp.sums");
  refuse_waits("the thread that sums tensors of collectives");
  for (;;) {
    wake_.wait();
    for (;;) {
      entry next;
      {
        std::lock_guard guard{mutex_};
        if (entries_.empty()) {
          running_ = false;
          if (ending_)
            return;
          break;
        }
        next = std::move(entries_.front());
        entries_.pop_front();
      }
      next.f();
      next.f = nullptr;
      --open_;
    }
  }
}

} // namespace smp
