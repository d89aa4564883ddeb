#include "tests/support/catch.hpp"

#include "tests/simulated/driver/events.hpp"
#include "tests/simulated/driver/memory.hpp"
#include "tests/simulated/driver/options.hpp"
#include "tests/simulated/driver/races.hpp"
#include "tests/simulated/driver/streams.hpp"

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <thread>
#include <vector>

// The driver alone: no Torch, so that ThreadSanitizer sees all of it.

using namespace smp;

namespace {

using block = std::array<int, 1000>;

/// A thread that hands blocks from one of its streams to another.
class handing_over {
public:
  explicit handing_over(int device) : device_(device) {
    // nop
  }

  /// @returns whether the second stream has read what the first one wrote
  bool hand_over(int value) {
    auto* made = static_cast<block*>(
      sim::allocate(device_, from_, sizeof(block)));
    auto* view = sim::kernel_view(made);
    std::atomic<int64_t> sum{0};
    auto written = sim::make_event();
    sim::launch(device_, from_, "fill", [=] { view->fill(value); },
                {{made, sizeof(block), true}});
    sim::record(written, device_, from_);
    sim::wait(written, device_, to_);
    sim::launch(device_, to_, "sum",
                [&sum, view] {
                  for (auto x : *view)
                    sum += x;
                },
                {{made, sizeof(block), false}});
    sim::use_on(made, device_, to_);
    sim::free(made);
    wait_somehow(value);
    return sum == 1000 * value;
  }

private:
  void wait_somehow(int way) {
    if (way % 3 == 0) {
      sim::wait_stream(device_, to_);
      return;
    }
    auto end = sim::make_event();
    sim::record(end, device_, to_);
    if (way % 3 == 1)
      sim::synchronize(end);
    while (!sim::done(end))
      std::this_thread::yield();
  }

  int device_;
  int64_t from_ = sim::new_stream(device_), to_ = sim::new_stream(device_);
};

} // namespace

TEST_CASE("threads hand over memory between streams of two devices",
          "[device]") {
  auto strict = sim::config();
  strict.poison = strict.check = true;
  strict.delay_us = 20;
  sim::changed_options changed{strict};
  sim::forget_races();
  std::atomic<int> right{0};
  std::vector<std::thread> threads;
  for (auto i = 0; i < 4; ++i)
    threads.emplace_back([&right, device = i % 2] {
      handing_over x{device};
      for (auto value = 0; value < 100; ++value)
        right += x.hand_over(value) ? 1 : 0;
    });
  for (auto& x : threads)
    x.join();
  CHECK(right == 400);
  CHECK(sim::races_found() == 0);
}

TEST_CASE("addresses of a device are used again when there are no new ones",
          "[device]") {
  auto before = sim::memory(0).free;
  auto* stale = sim::raw_allocate(0, 1 << 20);
  sim::raw_free(stale);
  auto* fresh = sim::raw_allocate(0, 1 << 20);
  CHECK(fresh != stale);
  sim::raw_free(fresh);
  auto again = 0;
  for (auto i = 0; i < 5000; ++i) {
    auto* made = sim::raw_allocate(0, 1 << 20);
    again += made == stale ? 1 : 0;
    sim::raw_free(made);
  }
  CHECK(again > 0);
  CHECK(sim::memory(0).free == before);
}

TEST_CASE("a device has no more memory than it was given", "[device]") {
  auto small = sim::config();
  small.capacity = sim::memory(1).total - sim::memory(1).free + (8 << 20);
  sim::changed_options changed{small};
  auto* half = sim::raw_allocate(1, 4 << 20);
  CHECK(sim::raw_allocate(1, 6 << 20) == nullptr);
  CHECK(sim::allocate(1, 0, 6 << 20) == nullptr);
  auto* rest = sim::allocate(1, 0, 4 << 20);
  CHECK(rest != nullptr);
  sim::free(rest); // stays in the cache, until somebody wants it
  auto* whole = sim::allocate(1, 0, 3 << 20);
  CHECK(whole != nullptr);
  sim::free(whole);
  sim::empty_cache(1);
  sim::raw_free(half);
}
