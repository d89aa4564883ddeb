#include "tests/support/catch.hpp"

#include "actors/comm/message_priority.hpp"
#include "actors/comm/send_window.hpp"
#include "actors/protocol/wire.hpp"
#include "tests/support/actors/payloads.hpp"

#include <random>
#include <vector>

using namespace smp;
using namespace smp::test;

namespace {

/// The first byte says how urgent it is.
uint8_t by_first_byte(const message& x) {
  return std::to_integer<uint8_t>(x.body.bytes.at(0));
}

comm_message_ptr make(uint64_t number, uint8_t urgency, uint64_t bytes = 10,
                      uint64_t peer = 1) {
  auto result = std::make_shared<comm_message>();
  result->number = number;
  result->peer = rank_id{peer};
  result->bytes = bytes;
  result->content.body.bytes = {std::byte{urgency}};
  return result;
}

} // namespace

TEST_CASE("what finds no room goes later, the most urgent first",
          "[actors][comm]") {
  send_window x{by_first_byte, {2, 1000}};
  CHECK(x.enter(make(1, 5)));
  CHECK(x.enter(make(2, 5)));
  CHECK_FALSE(x.enter(make(3, 5)));
  CHECK_FALSE(x.enter(make(4, 0)));
  CHECK_FALSE(x.enter(make(5, 5)));
  CHECK_FALSE(x.enter(make(6, 0)));
  CHECK(x.queued_to(rank_id{1}) == 4);
  // Another rank has a window of its own.
  CHECK(x.enter(make(7, 5, 10, 2)));
  std::vector<uint64_t> order;
  for (int i = 0; i < 6; ++i) {
    if (x.leave(rank_id{1}, 10))
      while (auto y = x.next(rank_id{1}))
        order.push_back(y->number);
  }
  CHECK(order == std::vector<uint64_t>{4, 6, 3, 5});
  CHECK(x.queued_to(rank_id{1}) == 0);
  CHECK(x.enter(make(8, 5)));
}

TEST_CASE("bytes are bounded too, but for one message alone",
          "[actors][comm]") {
  send_window x{by_first_byte, {8, 1000}};
  CHECK(x.enter(make(1, 0, 5000)));
  CHECK_FALSE(x.enter(make(2, 0, 600)));
  CHECK_FALSE(x.enter(make(3, 0, 600)));
  REQUIRE(x.leave(rank_id{1}, 5000));
  CHECK(x.next(rank_id{1})->number == 2);
  CHECK(x.next(rank_id{1}) == nullptr);
  auto peers = x.status();
  REQUIRE(peers.size() == 1);
  CHECK(peers[0].open == 1);
  CHECK(peers[0].open_bytes == 600);
  CHECK(peers[0].queued == 1);
  CHECK(peers[0].queued_bytes == 600);
}

TEST_CASE("one at a time gives out what was kept", "[actors][comm]") {
  send_window x{by_first_byte, {1, 1000}};
  CHECK(x.enter(make(1, 0)));
  CHECK_FALSE(x.enter(make(2, 0)));
  CHECK_FALSE(x.enter(make(3, 0)));
  REQUIRE(x.leave(rank_id{1}, 10));
  CHECK(x.next(rank_id{1})->number == 2);
  // It fails at once, while the first one still gives out.
  CHECK_FALSE(x.leave(rank_id{1}, 10));
  CHECK(x.next(rank_id{1})->number == 3);
  CHECK(x.next(rank_id{1}) == nullptr);
  CHECK_FALSE(x.leave(rank_id{1}, 10));
}

TEST_CASE("after the end all may go, and what was kept is given back",
          "[actors][comm]") {
  send_window x{by_first_byte, {1, 1000}};
  CHECK(x.enter(make(1, 0)));
  CHECK_FALSE(x.enter(make(2, 0)));
  auto kept = x.close();
  REQUIRE(kept.size() == 1);
  CHECK(kept[0]->number == 2);
  CHECK(x.enter(make(3, 0)));
  CHECK(x.queued_to(rank_id{1}) == 0);
}

TEST_CASE("whatever the order of ends, the window is kept and nothing is lost",
          "[actors][comm]") {
  auto seed = GENERATE(range(1u, 6u));
  std::mt19937 random{seed};
  send_window x{by_first_byte, {4, 300}};
  std::vector<uint64_t> open; // bytes
  uint64_t bytes = 0;
  uint64_t went = 0;
  auto goes = [&](uint64_t size) {
    open.push_back(size);
    bytes += size;
    ++went;
    REQUIRE(open.size() <= 4);
    REQUIRE((bytes <= 300 || open.size() == 1));
  };
  for (uint64_t i = 0; i < 2000; ++i) {
    auto size = 1 + random() % 400;
    if (x.enter(make(i, static_cast<uint8_t>(random() % 3), size)))
      goes(size);
    for (auto n = random() % 3; n > 0 && !open.empty(); --n) {
      auto which = random() % open.size();
      auto size = open[which];
      open.erase(open.begin() + static_cast<ptrdiff_t>(which));
      bytes -= size;
      if (x.leave(rank_id{1}, size))
        while (auto y = x.next(rank_id{1}))
          goes(y->bytes);
    }
  }
  while (!open.empty()) {
    auto size = open.back();
    open.pop_back();
    bytes -= size;
    if (x.leave(rank_id{1}, size))
      while (auto y = x.next(rank_id{1}))
        goes(y->bytes);
  }
  CHECK(went == 2000);
  CHECK(x.queued_to(rank_id{1}) == 0);
}

TEST_CASE("backward goes before forward, and all else between",
          "[actors][comm]") {
  request x;
  x.id = {rank_id{0}, 7};
  x.what = phase::backward;
  CHECK(priority_of(encode(x)) == 0);
  x.what = phase::forward;
  CHECK(priority_of(encode(x)) == 2);
  CHECK(priority_of(encode(recorded_request{{rank_id{0}, 7}, {}, {}})) == 1);
  CHECK(priority_of(encode(response{{rank_id{0}, 7}, {}, {}})) == 1);
  CHECK(priority_of(make_message("no request at all")) == 1);
  CHECK(priority_of(make_message("", {}, message_kind::collective)) == 1);
}
