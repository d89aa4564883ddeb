#include "runtime/device/device_watch.hpp"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <chrono>
#include <condition_variable>
#include <utility>

#include <pthread.h>

namespace smp {

std::optional<std::string> failure_of(c10::Stream x) {
  try {
    c10::impl::VirtualGuardImpl{x.device_type()}.queryStream(x);
    return std::nullopt;
  } catch (const c10::AcceleratorError& e) {
    return e.what_without_backtrace();
  }
}

device_watch::~device_watch() = default;

void device_watch::when_reached(
  const std::function<void(std::function<void()>)>& ask,
  std::function<void()> f) {
  uint64_t number = 0;
  {
    std::lock_guard guard{waiting_->mutex};
    number = waiting_->next++;
    waiting_->calls.emplace(number, std::move(f));
    if (!thread_.joinable())
      thread_ = std::jthread{
        [this](const std::stop_token& stop) { run(stop); }};
  }
  ask([waiting = waiting_, number] { waiting->tell(number); });
}

void device_watch::waiting::tell(uint64_t number) {
  std::function<void()> f;
  {
    std::lock_guard guard{mutex};
    auto i = calls.find(number);
    if (i == calls.end())
      return;
    f = std::move(i->second);
    calls.erase(i);
  }
  f();
}

void device_watch::waiting::tell_all() {
  std::map<uint64_t, std::function<void()>> all;
  {
    std::lock_guard guard{mutex};
    all.swap(calls);
  }
  for (auto& [number, f] : all)
    f();
}

void device_watch::run(const std::stop_token& stop) {
  pthread_setname_np(pthread_self(), "smp.device");
  constexpr std::chrono::milliseconds between_looks{500};
  std::mutex mutex;
  std::condition_variable_any sleep;
  std::unique_lock guard{mutex};
  while (!sleep.wait_for(guard, stop, between_looks,
                         [&] { return stop.stop_requested(); })) {
    {
      std::lock_guard looking{waiting_->mutex};
      if (waiting_->calls.empty())
        continue;
    }
    if (failure_of(looked_at_))
      waiting_->tell_all();
  }
}

} // namespace smp
