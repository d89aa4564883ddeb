#include "tests/support/catch.hpp"

#include "actors/comm/message_priority.hpp"
#include "actors/protocol/wire.hpp"
#include "tests/support/actors/payloads.hpp"
#include "tests/support/actors/staged_rank.hpp"

#include <random>
#include <utility>
#include <vector>

using namespace smp;
using namespace smp::test;

namespace {

constexpr uint64_t mb = uint64_t{1} << 20;

/// The bounds of a window.
constexpr size_t most = 8;
constexpr uint64_t most_bytes = 128 * mb;

/// A message with a tensor of `size` bytes, which nothing reads.
/// @param priority 0: the most urgent, to 2
message make(uint64_t size, uint8_t priority = 1) {
  request x;
  x.what = priority == 0 ? phase::backward : phase::forward;
  auto result = priority == 1 ? make_message("") : encode(x);
  result.body.tensors.emplace_back().nbytes = size;
  return result;
}

uint64_t size_of(const held_fabric::entry& x) {
  return x.content.body.tensors.at(0).nbytes;
}

} // namespace

TEST_CASE("what finds no room goes later, the most urgent first",
          "[actors][comm]") {
  staged_rank x;
  auto& out = x.below->held;
  for (uint64_t i = 0; i < most; ++i)
    x.send(make(9000 + i, 2));
  x.send(make(5003));
  x.send(make(5004, 0));
  x.send(make(5005));
  x.send(make(5006, 0));
  CHECK(out.size() == most);
  CHECK(x.stages.queued_to(rank_id{1}) == 4);
  // Another rank has a window of its own.
  x.send(make(5007), 2);
  CHECK(out.size() == most + 1);
  out.pop_back();
  std::vector<uint64_t> order;
  for (int i = 0; i < 4; ++i) {
    x.below->leave();
    order.push_back(size_of(out.back()));
  }
  CHECK(order == std::vector<uint64_t>{5004, 5006, 5003, 5005});
  CHECK(x.stages.queued_to(rank_id{1}) == 0);
  x.below->leave();
  x.send(make(5008, 2));
  CHECK(out.size() == most);
}

TEST_CASE("bytes are bounded too, but for one message alone",
          "[actors][comm]") {
  staged_rank x;
  auto& out = x.below->held;
  x.send(make(5 * most_bytes));
  x.send(make(77 * mb));
  x.send(make(77 * mb));
  CHECK(out.size() == 1);
  x.below->leave();
  REQUIRE(out.size() == 1);
  CHECK(size_of(out[0]) == 77 * mb);
  auto peers = x.stages.status().peers;
  REQUIRE(peers.size() == 1);
  CHECK(peers[0].open == 1);
  CHECK(peers[0].open_bytes == 77 * mb);
  CHECK(peers[0].queued == 1);
  CHECK(peers[0].queued_bytes == 77 * mb);
}

TEST_CASE("whatever the order of ends, the window is kept and nothing is lost",
          "[actors][comm]") {
  auto seed = GENERATE(range(1u, 6u));
  std::mt19937 random{seed};
  staged_rank x;
  auto& out = x.below->held;
  auto check = [&] {
    uint64_t bytes = 0;
    for (auto& y : out)
      bytes += size_of(y);
    REQUIRE(out.size() <= most);
    REQUIRE((bytes <= most_bytes || out.size() == 1));
  };
  for (int i = 0; i < 2000; ++i) {
    x.send(make((1 + random() % 170) * mb, static_cast<uint8_t>(random() % 3)));
    check();
    for (auto n = random() % 3; n > 0 && !out.empty(); --n) {
      x.below->leave(random() % out.size());
      check();
    }
  }
  while (!out.empty()) {
    x.below->leave(out.size() - 1);
    check();
  }
  CHECK(x.ends.size() == 2000);
  CHECK(x.stages.queued_to(rank_id{1}) == 0);
}

TEST_CASE("backward goes before forward, and all else between",
          "[actors][comm]") {
  request x;
  x.id = {rank_id{0}, 7};
  x.what = phase::backward;
  CHECK(priority_of(encode(x)) == 0);
  x.what = phase::forward;
  CHECK(priority_of(encode(x)) == 2);
  CHECK(priority_of(encode(response{{rank_id{0}, 7}, {}, {}})) == 1);
  CHECK(priority_of(make_message("no request at all")) == 1);
  CHECK(priority_of(make_message("", {}, message_kind::collective)) == 1);
}
