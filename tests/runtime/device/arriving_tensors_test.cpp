#include "tests/support/catch.hpp"

#include "runtime/device/arriving_tensors.hpp"
#include "runtime/train/batch_feed.hpp"
#include "tests/simulated/driver/failures.hpp"
#include "tests/simulated/driver/host_waits.hpp"
#include "tests/simulated/mistakes.hpp"
#include "tests/support/torch/simulated.hpp"

#include <torch/torch.h>

#include <memory>
#include <vector>

// Batches that are copied to a device beside its kernels.

using namespace smp;
using namespace smp::test;
using torch::Tensor;

namespace {

struct device_of_rank {
  device_of_rank() {
    rank->enter_thread();
  }

  ~device_of_rank() {
    rank->leave_thread();
  }

  checked_devices devices{200};
  std::shared_ptr<rank_device> rank = choose_device("sim", 0);
  std::shared_ptr<storage_copies> copies = rank->make_storage_copies();
};

batch numbers(uint64_t step) {
  return {torch::arange(100'000) + static_cast<int64_t>(step),
          torch::rand({4, 3, 8, 8}).contiguous(at::MemoryFormat::ChannelsLast),
          torch::ones({6, 4}).t().slice(0, 0, 4, 2), torch::empty({0, 3}),
          Tensor{}};
}

void compare(const batch& x, const batch& on_host) {
  REQUIRE(x.size() == on_host.size());
  for (size_t i = 0; i < 3; ++i) {
    INFO("tensor " << i);
    CHECK(x[i].device() == sim_device());
    CHECK(x[i].strides() == on_host[i].to(sim_device()).strides());
    CHECK(torch::equal((x[i] + 1).cpu(), on_host[i] + 1));
  }
  CHECK(x[3].sizes() == on_host[3].sizes());
  CHECK_FALSE(x[4].defined());
}

} // namespace

TEST_CASE("tensors arrive on a device as they are, and nobody waits",
          "[runtime][device]") {
  device_of_rank x;
  auto on_host = numbers(1);
  sim::reset_host_waits();
  arriving_tensors arriving{*x.copies, on_host};
  auto there = arriving.take();
  auto more = there[0] + 1;
  CHECK(sim::host_waits().number == 0);
  compare(there, on_host);
  CHECK(x.devices.race() == "");
}

TEST_CASE("a batch that is read before it has arrived shows",
          "[runtime][device]") {
  auto* name = GENERATE("unawaited-return", "early-return");
  device_of_rank x;
  for (int i = 0; i < 3; ++i) { // the memory of one is that of the next but one
    sim::seed_mistake(i > 0 ? name : nullptr);
    arriving_tensors arriving{*x.copies, numbers(1)};
    auto sum = arriving.take()[0].sum();
  }
  sim::seed_mistake(nullptr);
  INFO(name);
  CHECK(x.devices.race() != "");
}

TEST_CASE("the batch of the next step is on its way while a step runs",
          "[runtime][device]") {
  device_of_rank x;
  std::vector<uint64_t> made;
  std::vector<batch> on_host;
  for (uint64_t i = 0; i < 4; ++i)
    on_host.push_back(numbers(i));
  batch_feed feed{[&](uint64_t step) {
    made.push_back(step);
    return on_host.at(step);
  }};
  CHECK(feed.take(0, false)[0].is_cpu());
  feed.send_ahead(x.copies);
  feed.take(1, false);
  CHECK(made == std::vector<uint64_t>{0, 2, 1});
  compare(feed.take(2, false), on_host[2]);
  compare(feed.take(3, true), on_host[3]);
  CHECK(made == std::vector<uint64_t>{0, 2, 1, 3});
  // Of a run that does something else than the next step,
  CHECK(feed.take(1, false)[0].is_cpu());
  CHECK(feed.take(0, false)[0].is_cpu());
  CHECK(x.devices.race() == "");
  // or on a device that does nothing any more.
  sim::fail_device(0);
  CHECK(feed.take(1, false)[0].sizes() == on_host[1][0].sizes());
  CHECK(feed.take(2, false)[0].is_cpu());
}
