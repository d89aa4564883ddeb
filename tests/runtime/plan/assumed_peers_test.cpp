#include "tests/support/catch.hpp"

#include "runtime/plan/assumed_peers.hpp"
#include "tests/support/torch/thread_group.hpp"

#include <torch/types.h>

#include <string>
#include <vector>

// Peers that are not there, beside threads that have the same tensors.

using namespace smp;
using namespace smp::test;

namespace {

/// What the calling thread's rank gets of each collective.
std::vector<at::Tensor> results_of(tensor_group& group) {
  auto peers = static_cast<int64_t>(group.size());
  auto whole = torch::arange(6, torch::kFloat).view({2, 3});
  auto parts = torch::arange(2 * peers, torch::kLong).view({peers, 2});
  return {group.allreduce(whole, "a"), group.allgather(whole, "b"),
          group.reduce_scatter(parts, "c"), group.all_to_all(parts, "d")};
}

/// @returns the rows that come if each peer gives one more to the next
at::Tensor rows_of(tensor_group& group) {
  std::vector<int64_t> given;
  int64_t all = 0;
  for (uint64_t i = 0; i < group.size(); ++i)
    all += given.emplace_back(static_cast<int64_t>(i) + 1);
  const std::vector<int64_t> taken(group.size(), given[group.rank()]);
  return group.exchange_rows(torch::ones({all, 5}), given, taken, "e");
}

} // namespace

TEST_CASE("assumed peers give what peers would that have the same",
          "[runtime][plan]") {
  uint64_t peers = GENERATE(2, 4);
  std::vector<at::Tensor> found;
  std::vector<int64_t> sizes;
  thread_group threads{peers};
  threads.on_all([&](uint64_t rank) {
    auto results = results_of(tensor_group::current());
    auto rows = rows_of(tensor_group::current());
    if (rank == 0) {
      found = results;
      sizes = rows.sizes().vec();
    }
  });
  assumed_peers assumed{peers, false};
  auto said = results_of(assumed);
  REQUIRE(said.size() == found.size());
  for (size_t i = 0; i < said.size(); ++i) {
    INFO("collective " << i);
    CHECK(said[i].scalar_type() == found[i].scalar_type());
    CHECK(said[i].equal(found[i]));
  }
  CHECK(rows_of(assumed).sizes().vec() == sizes);
}
