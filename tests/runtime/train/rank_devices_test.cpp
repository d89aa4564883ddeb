#include "tests/support/catch.hpp"

#include "runtime/train/rank_devices.hpp"

#include <string>
#include <utility>
#include <vector>

using namespace smp;

namespace {

constexpr uint64_t gb = 1'000'000'000;

/// Of `count` ranks, as many on each machine as it has devices.
std::vector<rank_place> places(uint64_t count, uint64_t devices) {
  std::vector<rank_place> result;
  for (uint64_t i = 0; i < count; ++i) {
    auto machine = i / devices;
    result.push_back({.machine = machine,
                      .host = "node" + std::to_string(machine + 1),
                      .pp_rank = i,
                      .device = "cuda:" + std::to_string(i % devices),
                      .memory = 85 * gb});
  }
  return result;
}

using lines = std::vector<std::string>;

} // namespace

TEST_CASE("a run says which devices its ranks have", "[runtime][device]") {
  CHECK(devices_text(places(1, 4)) == lines{"cuda:0 (85.0 GB)"});
  CHECK(devices_text(places(2, 4))
        == lines{"ranks 0, 1: cuda:0, 1 (85.0 GB each)"});
  CHECK(devices_text(places(8, 4))
        == lines{"ranks 0-3 on node1: cuda:0-3 (85.0 GB each)",
                 "ranks 4-7 on node2: cuda:0-3 (85.0 GB each)"});
  CHECK(devices_text({{}, {}}) == lines{});
}

TEST_CASE("a run says so where ranks and devices are not in the same order",
          "[runtime][device]") {
  // Two ranks for each stage, and for each device.
  auto shared = places(4, 4);
  for (size_t i = 0; i < 4; ++i) {
    shared[i].pp_rank = i / 2;
    shared[i].device = "cuda:" + std::to_string(i % 2);
  }
  shared[3].memory = 42 * gb;
  CHECK(devices_text(shared)
        == lines{"ranks 0-3: cuda:0, 1, 0, 1 (42.0 to 85.0 GB), devices 0, 0, "
                 "1, 1 of the partition"});
  // Neighbours are on different machines.
  auto in_turn = places(8, 4);
  std::swap(in_turn[0], in_turn[7]);
  in_turn[0].pp_rank = 0;
  in_turn[7].pp_rank = 7;
  CHECK(devices_text(in_turn)
        == lines{"ranks 1-3, 7 on node1: cuda:1-3, 0 (85.0 GB each)",
                 "ranks 0, 4-6 on node2: cuda:3, 0-2 (85.0 GB each)"});
}
