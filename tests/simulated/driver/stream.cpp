#include "tests/simulated/driver/stream.hpp"

#include "tests/simulated/driver/failures.hpp"
#include "tests/simulated/driver/options.hpp"

#include <algorithm>
#include <chrono>
#include <exception>
#include <stdexcept>
#include <utility>

namespace smp::sim {

namespace {

thread_local auto in_host_function = false;
thread_local const char* forbidden_use = nullptr;

} // namespace

stream::stream(int device, size_t slot, uint64_t seed)
  : device_(device),
    slot_(slot),
    random_(seed * 1000003 + slot),
    thread_([this] { run(); }) {
  // nop
}

void stream::push(std::function<void()> run) {
  push({std::move(run), kind::internal});
}

void stream::push_kernel(std::function<void()> kernel) {
  push({std::move(kernel), kind::kernel});
}

void stream::push_host_function(std::function<void()> function) {
  push({std::move(function), kind::host_function});
}

void stream::push(job next) {
  {
    std::lock_guard guard{mutex_};
    if (next.what == kind::kernel)
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
    if (next.what == kind::kernel)
      --kernels_;
    busy_ = false;
    if (queue_.empty())
      idle_.notify_all();
  }
}

std::string stream::run_one(job& next) {
  std::string problem;
  in_host_function = next.what == kind::host_function;
  try {
    if (next.what == kind::kernel)
      delay();
    // Streams of other devices, too, wait for its events.
    if (next.what == kind::internal || !has_failed(device_))
      next.run();
  } catch (const std::exception& error) {
    problem = error.what();
  }
  next.run = nullptr; // what it holds goes before the stream is idle
  in_host_function = false;
  if (const auto* use = std::exchange(forbidden_use, nullptr))
    problem = std::string{"a host function has used a device: "} + use;
  return problem;
}

void no_host_function(const char* use) noexcept {
  if (in_host_function)
    forbidden_use = use;
}

void stream::delay() {
  auto longest = static_cast<uint64_t>(config().delay_us);
  if (longest > 0)
    std::this_thread::sleep_for(std::chrono::microseconds{random_() % longest});
}

} // namespace smp::sim
