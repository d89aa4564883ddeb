#include "tests/support/catch.hpp"

#include "tests/support/actors/inbox.hpp"
#include "tests/support/actors/payloads.hpp"
#include "transport/loopback/loopback_fabric.hpp"

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

using namespace smp;
using namespace smp::test;

namespace {

/// A stepped network with all ranks started.
struct fixture {
  explicit fixture(uint64_t size, uint64_t seed = 1, bool reorder = true)
    : network{size, {seed, reorder, true}}, heard(size) {
    std::vector<std::string> addresses;
    for (uint64_t i = 0; i < size; ++i)
      addresses.push_back(network.at(rank_id{i}).address());
    for (uint64_t i = 0; i < size; ++i)
      network.at(rank_id{i}).start(addresses, heard[i]);
  }

  ~fixture() {
    for (uint64_t i = 0; i < network.size(); ++i)
      network.at(rank_id{i}).stop(std::chrono::milliseconds{0});
  }

  fabric& at(uint64_t rank) {
    return network.at(rank_id{rank});
  }

  std::vector<std::string> texts(uint64_t rank) {
    std::vector<std::string> result;
    for (auto& [from, x] : heard[rank].messages())
      result.push_back(to_text(x.body.bytes));
    return result;
  }

  loopback_network network;
  std::vector<inbox> heard;
};

std::vector<std::string> order_of(uint64_t seed, bool reorder) {
  fixture f{2, seed, reorder};
  for (int i = 0; i < 10; ++i)
    f.at(0).send(rank_id{1}, make_message(std::to_string(i)));
  f.network.run();
  return f.texts(1);
}

failure killed(uint64_t rank) {
  return {error_code::rank_down, rank_id{rank}, {}, "killed by signal 9"};
}

} // namespace

TEST_CASE("a stepped network moves nothing by itself",
          "[transport][loopback]") {
  fixture f{2};
  f.at(0).send(rank_id{1}, make_message("a"), f.heard[0].on_sent());
  CHECK(f.heard[1].messages().empty());
  CHECK(f.heard[0].sent() == 0);
  CHECK(f.network.deliver_one());
  CHECK_FALSE(f.network.deliver_one());
  CHECK(f.texts(1) == std::vector<std::string>{"a"});
  CHECK(f.heard[0].sent() == 1);
}

TEST_CASE("the seed decides the order of delivery", "[transport][loopback]") {
  auto first = order_of(7, true);
  CHECK(first == order_of(7, true));
  CHECK(first != order_of(8, true));
  auto sorted = order_of(7, false);
  CHECK(first != sorted);
  CHECK(std::is_sorted(sorted.begin(), sorted.end()));
  std::sort(first.begin(), first.end());
  CHECK(first == sorted);
}

TEST_CASE("a delivered tensor shares no bytes with the sent one",
          "[transport][loopback]") {
  fixture f{2};
  auto tensor = make_tensor(1000, 5);
  f.at(0).send(rank_id{1}, make_message("x", {tensor}));
  f.network.run();
  auto got = f.heard[1].take_messages();
  REQUIRE(got.size() == 1);
  auto& received = got[0].second.body.tensors[0];
  CHECK(received.data != tensor.data);
  CHECK(same_bytes(received, pattern(1000, 5)));
  CHECK(received.shape == tensor.shape);
  CHECK(received.dtype == tensor.dtype);
  CHECK(received.owner.use_count() == 1);
}

TEST_CASE("a tensor is not copied before its message leaves",
          "[transport][loopback]") {
  // So a sender that writes too early spoils its own message, as it would
  // over a rendezvous, and a test of that sender can see it.
  fixture f{2};
  auto bytes = std::make_shared<std::vector<std::byte>>(pattern(8, 1));
  tensor_ref tensor;
  tensor.data = bytes->data();
  tensor.nbytes = 8;
  tensor.shape = {8};
  tensor.owner = bytes;
  f.at(0).send(rank_id{1}, make_message("x", {tensor}));
  std::memcpy(bytes->data(), pattern(8, 2).data(), 8);
  f.network.run();
  CHECK(
    same_bytes(f.heard[1].messages()[0].second.body.tensors[0], pattern(8, 2)));
}

TEST_CASE("a filter loses messages, which count as sent",
          "[transport][loopback]") {
  fixture f{3};
  f.network.set_filter([](rank_id from, rank_id to, const message& x) {
    return !(from == rank_id{0} && to == rank_id{1}
             && to_text(x.body.bytes) == "lose");
  });
  f.at(0).send(rank_id{1}, make_message("lose"), f.heard[0].on_sent());
  f.at(0).send(rank_id{1}, make_message("keep"), f.heard[0].on_sent());
  f.at(0).send(rank_id{2}, make_message("lose"), f.heard[0].on_sent());
  f.network.run();
  CHECK(f.texts(1) == std::vector<std::string>{"keep"});
  CHECK(f.texts(2) == std::vector<std::string>{"lose"});
  CHECK(f.heard[0].sent() == 3);
  CHECK(f.heard[0].send_failures().empty());
}

TEST_CASE("a killed rank is lost to all others and to what is in flight",
          "[transport][loopback]") {
  fixture f{3};
  f.at(0).send(rank_id{1}, make_message("to the dead"), f.heard[0].on_sent());
  f.at(1).send(rank_id{2}, make_message("of the dead"), f.heard[1].on_sent());
  f.at(0).send(rank_id{2}, make_message("of the living"));
  f.network.kill(killed(1));
  f.network.run();
  CHECK(f.heard[0].send_failures() == std::vector<failure>{killed(1)});
  CHECK(f.heard[1].send_failures() == std::vector<failure>{killed(1)});
  CHECK(f.heard[0].losses() == std::vector<failure>{killed(1)});
  CHECK(f.heard[2].losses() == std::vector<failure>{killed(1)});
  CHECK(f.heard[1].losses().empty());
  CHECK(f.texts(1).empty());
  CHECK(f.texts(2) == std::vector<std::string>{"of the living"});
}

TEST_CASE("what is on its way to a rank that leaves has lost its receiver",
          "[transport][loopback][R39]") {
  // It is not what cancels it: a step that waits for an answer would fail for a
  // consequence of the loss.
  fixture f{3};
  f.at(0).send(rank_id{1}, make_message("x"), f.heard[0].on_sent());
  f.at(1).stop(std::chrono::milliseconds{0});
  CHECK(f.heard[0].send_failures()
        == std::vector<failure>{left_the_run(rank_id{1}, std::nullopt)});
  // For the sake of another one.
  f.at(0).send(rank_id{2}, make_message("x"), f.heard[0].on_sent());
  f.at(2).peer_lost(killed(1));
  f.at(2).stop(std::chrono::milliseconds{0});
  CHECK(f.heard[0].send_failures().back()
        == left_the_run(rank_id{2}, rank_id{1}));
}

TEST_CASE("the news that a rank is lost comes also when it was stopped since",
          "[transport][loopback]") {
  fixture f{2};
  f.at(0).peer_lost(killed(1));
  f.at(1).stop(std::chrono::milliseconds{0});
  f.network.run();
  CHECK(f.heard[0].losses() == std::vector<failure>{killed(1)});
}

TEST_CASE("messages wait for a rank that starts late",
          "[transport][loopback]") {
  loopback_network network{2, {1, true, true}};
  std::vector<inbox> heard(2);
  std::vector<std::string> addresses{"a", "b"};
  network.at(rank_id{0}).start(addresses, heard[0]);
  network.at(rank_id{0}).send(rank_id{1}, make_message("early"));
  CHECK_FALSE(network.deliver_one());
  network.at(rank_id{1}).start(addresses, heard[1]);
  CHECK(network.deliver_one());
  CHECK(heard[1].messages().size() == 1);
  network.at(rank_id{0}).stop(std::chrono::milliseconds{0});
  network.at(rank_id{1}).stop(std::chrono::milliseconds{0});
}

TEST_CASE("a wrong number of addresses is refused", "[transport][loopback]") {
  loopback_network network{2, {1, true, true}};
  inbox heard;
  CHECK_THROWS_AS(network.at(rank_id{0}).start({"a"}, heard), error);
}
