#include "tests/simulated/driver/stream.hpp"

#include "tests/simulated/driver/options.hpp"

#include <algorithm>
#include <chrono>
#include <exception>
#include <stdexcept>
#include <utility>

namespace smp::sim {

stream::stream(size_t slot, uint64_t seed)
  : slot_(slot), random_(seed * 1000003 + slot), thread_([this] { run(); }) {
  // nop
}

void stream::push(std::function<void()> run) {
  push({std::move(run), false});
}

void stream::push_kernel(std::function<void()> kernel) {
  push({std::move(kernel), true});
}

void stream::push(job next) {
  {
    std::lock_guard guard{mutex_};
    if (next.kernel)
      most_kernels_ = std::max(most_kernels_, ++kernels_);
    queue_.push_back(std::move(next));
  }
  work_.notify_one();
}

bool stream::idle() {
  std::lock_guard guard{mutex_};
  return queue_.empty() && !busy_;
}

void stream::await_idle(std::unique_lock<std::mutex>& guard) {
  idle_.wait(guard, [this] { return stopped_ || (queue_.empty() && !busy_); });
}

void stream::wait_until_idle() {
  std::unique_lock guard{mutex_};
  await_idle(guard);
}

void stream::settle() {
  std::unique_lock guard{mutex_};
  await_idle(guard);
  if (!error_.empty())
    throw std::runtime_error{"failed earlier on the device: "
                             + std::exchange(error_, {})};
}

void stream::ask_to_stop() {
  {
    std::lock_guard guard{mutex_};
    stopped_ = true;
  }
  work_.notify_all();
  idle_.notify_all();
}

void stream::join_thread() {
  if (thread_.joinable())
    thread_.join();
}

size_t stream::most_queued() {
  std::lock_guard guard{mutex_};
  return most_kernels_;
}

void stream::reset_most_queued() {
  std::lock_guard guard{mutex_};
  most_kernels_ = kernels_;
}

void stream::run() {
  std::unique_lock guard{mutex_};
  for (;;) {
    work_.wait(guard, [this] { return stopped_ || !queue_.empty(); });
    if (stopped_)
      return;
    auto next = std::move(queue_.front());
    queue_.pop_front();
    busy_ = true;
    guard.unlock();
    auto problem = run_one(next);
    guard.lock();
    if (error_.empty())
      error_ = std::move(problem);
    if (next.kernel)
      --kernels_;
    busy_ = false;
    if (queue_.empty())
      idle_.notify_all();
  }
}

std::string stream::run_one(job& next) {
  std::string problem;
  try {
    if (next.kernel)
      delay();
    next.run();
  } catch (const std::exception& error) {
    problem = error.what();
  }
  next.run = nullptr; // what it holds goes before the stream is idle
  return problem;
}

void stream::delay() {
  auto longest = static_cast<uint64_t>(config().delay_us);
  if (longest > 0)
    std::this_thread::sleep_for(std::chrono::microseconds{random_() % longest});
}

} // namespace smp::sim
