#include "tests/simulated/driver/streams.hpp"

#include "tests/simulated/driver/failures.hpp"
#include "tests/simulated/driver/host_waits.hpp"
#include "tests/simulated/driver/options.hpp"
#include "tests/simulated/driver/stream.hpp"

#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <utility>

namespace smp::sim {

namespace {

// -- the streams of all devices -----------------------------------------------

constexpr size_t pool_size = 16;

std::atomic<uint64_t> kernel_count{0};
std::atomic<uint64_t> launch_count{0};
std::atomic<bool> is_stopping{false};

struct device_streams {
  std::mutex mutex;
  std::vector<std::unique_ptr<stream>> streams;
  size_t next_pooled = 0;
};

/// Never destroyed: at the end of the process its threads are stopped before
/// what kernels use goes.
class all_streams {
public:
  all_streams() : process_(getpid()) {
    // nop
  }

  stream& find(int device, int64_t id) {
    auto& found = of(device);
    std::lock_guard guard{found.mutex};
    have(device, 1);
    return *found.streams.at(static_cast<size_t>(id));
  }

  int64_t add(int device) {
    auto& found = of(device);
    std::lock_guard guard{found.mutex};
    have(device, found.streams.empty() ? 2 : found.streams.size() + 1);
    return static_cast<int64_t>(found.streams.size()) - 1;
  }

  int64_t pooled(int device) {
    auto& found = of(device);
    std::lock_guard guard{found.mutex};
    have(device, 1 + pool_size);
    return static_cast<int64_t>(1 + found.next_pooled++ % pool_size);
  }

  /// Of the streams there are at the moment.
  std::vector<stream*> all(int device) {
    auto& found = of(device);
    std::lock_guard guard{found.mutex};
    std::vector<stream*> result;
    for (auto& one : found.streams)
      result.push_back(one.get());
    return result;
  }

  void stop() {
    // A forked child has none of the threads.
    if (process_ != getpid())
      return;
    is_stopping = true;
    for (auto device = 0; device < max_devices; ++device)
      for (auto* one : all(device))
        one->ask_to_stop();
    for (auto device = 0; device < max_devices; ++device)
      for (auto* one : all(device))
        one->join_thread();
  }

private:
  device_streams& of(int device) {
    return devices_.at(static_cast<size_t>(device));
  }

  void have(int device, size_t number) {
    auto& streams = of(device).streams;
    while (streams.size() < number)
      streams.push_back(
        std::make_unique<stream>(device, slots_++, config().seed));
  }

  std::array<device_streams, max_devices> devices_;
  std::atomic<size_t> slots_{0};
  pid_t process_;
};

all_streams& the_streams() {
  static auto* const only = [] {
    auto* made = new all_streams;
    std::atexit([] { the_streams().stop(); });
    return made;
  }();
  return *only;
}

// -- of the calling thread ----------------------------------------------------

thread_local int this_device = 0;
thread_local std::array<int64_t, max_devices> these_streams{};

// -- races of a process that nobody asks for them -----------------------------

void tell_races() {
  auto number = races_found();
  if (number == 0)
    return;
  std::fprintf(stderr,
               "simulated device: %zu unordered accesses, the last: %s\n",
               static_cast<size_t>(number), last_race().c_str());
  std::fflush(nullptr);
  _exit(exit_code_of_races);
}

/// Before main, so that it runs after what the program does at its exit.
[[maybe_unused]] const auto told_at_exit = [] {
  if (config().check)
    std::atexit(tell_races);
  return true;
}();

// -- waiting ------------------------------------------------------------------

/// Empty if nobody checks.
clock_vector clock_of(stream& x) {
  auto guard = checker().lock();
  return guard ? x.seen : clock_vector{};
}

void wait_for(stream& x) {
  auto seen = clock_of(x);
  x.settle();
  checker().host_saw(seen);
}

} // namespace

// -- for the rest of the driver -----------------------------------------------

stream& find_stream(int device, int64_t id) {
  return the_streams().find(device, id);
}

void push_after(const clock_vector& also, int device, int64_t id,
                const char* name, std::function<void()> job,
                const std::vector<access>& accesses) {
  auto& on = find_stream(device, id);
  // The order of launches is that of the queue.
  auto guard = checker().lock();
  if (guard)
    checker().launched(on.seen, {on.slot(), name}, accesses, also);
  on.push(std::move(job));
}

void settle_device(int device) {
  for (auto* one : the_streams().all(device)) {
    auto seen = clock_of(*one);
    one->wait_until_idle();
    checker().host_saw(seen);
  }
}

void settle_all() {
  for (auto device = 0; device < max_devices; ++device)
    settle_device(device);
}

bool stopping() {
  return is_stopping;
}

// -- for everybody ------------------------------------------------------------

int current_device() {
  return this_device;
}

int exchange_device(int device) {
  if (device < 0 || device >= config().devices)
    throw std::runtime_error{"there is no device sim:"
                             + std::to_string(device)};
  return std::exchange(this_device, device);
}

int64_t current_stream(int device) {
  return these_streams.at(static_cast<size_t>(device));
}

int64_t exchange_stream(int device, int64_t id) {
  return std::exchange(these_streams.at(static_cast<size_t>(device)), id);
}

int64_t new_stream(int device) {
  no_host_function("a new stream");
  return the_streams().add(device);
}

int64_t pooled_stream(int device) {
  return the_streams().pooled(device);
}

bool device_used(int device) {
  return !the_streams().all(device).empty();
}

void launch(int device, int64_t id, const char* name,
            std::function<void()> kernel, const std::vector<access>& accesses) {
  no_host_function(name);
  if (++launch_count == config().fail_kernel)
    kernel = [device] { fail_device(device); };
  auto& on = find_stream(device, id);
  {
    auto guard = checker().lock();
    if (guard)
      checker().launched(on.seen, {on.slot(), name}, accesses, {});
    on.push_kernel([kernel = std::move(kernel)] {
      kernel();
      kernel_count.fetch_add(1, std::memory_order_relaxed);
    });
  }
  if (config().always_sync)
    wait_stream(device, id, name);
}

void notify(int device, int64_t id, std::function<void()> function) {
  no_host_function("a host function");
  auto& on = find_stream(device, id);
  clock_vector seen;
  auto guard = checker().lock();
  if (guard) {
    join(on.seen, checker().host());
    seen = on.seen;
  }
  // Whoever the function tells knows that all this has been done.
  on.push_host_function(
    [seen = std::move(seen), function = std::move(function)] {
      checker().host_saw(seen);
      function();
    });
}

bool stream_idle(int device, int64_t id) {
  no_host_function("a query of a stream");
  auto& on = find_stream(device, id);
  auto seen = clock_of(on);
  if (!on.idle())
    return false;
  checker().host_saw(seen);
  return true;
}

void wait_stream(int device, int64_t id, const char* reason) {
  no_host_function(reason);
  count_host_wait(reason);
  wait_for(find_stream(device, id));
}

void wait_device(int device, const char* reason) {
  no_host_function(reason);
  count_host_wait(reason);
  for (auto* one : the_streams().all(device))
    wait_for(*one);
}

uint64_t kernels_run() {
  return kernel_count;
}

size_t most_queued(int device, int64_t id) {
  return find_stream(device, id).most_queued();
}

void reset_most_queued(int device, int64_t id) {
  find_stream(device, id).reset_most_queued();
}

} // namespace smp::sim
