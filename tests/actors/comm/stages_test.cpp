#include "tests/support/catch.hpp"

#include "actors/comm/comm_router.hpp"
#include "tests/support/actors/payloads.hpp"
#include "tests/support/actors/staged_rank.hpp"

#include <algorithm>
#include <utility>
#include <vector>

using namespace smp;
using namespace smp::test;

namespace {

constexpr uint64_t kb = 1024;

comm_options forced(uint64_t ranks_per_node) {
  comm_options result;
  result.force_device_path = true;
  result.send_arena = 256 * kb;
  result.receive_arena = 256 * kb;
  result.ranks_per_node = ranks_per_node;
  return result;
}

const failure lost{error_code::rank_down, rank_id{1}, {}, "killed"};

bool in_arena(const std::pair<std::shared_ptr<std::byte>, uint64_t>& x,
              const tensor_ref& y) {
  auto first = x.first.get();
  auto at = static_cast<const std::byte*>(y.data);
  return at >= first && at < first + x.second;
}

/// A message of rank `from` that lies in the receive arena arrives.
void arrive_placed(staged_rank& x, uint64_t from, uint64_t size,
                   uint64_t name) {
  auto block = x.below->places->place({rank_id{from}, name, size});
  REQUIRE(block);
  std::ranges::copy(pattern(size, name), block.get());
  auto t = make_tensor(size, name);
  t.data = block.get();
  t.owner = std::move(block);
  x.below->arrive(rank_id{from}, make_message("x", {std::move(t)}));
}

} // namespace

TEST_CASE("the rules are those of the paper, in its order", "[actors][comm]") {
  CHECK(decide(false, {true, true, true}) == comm_rule::host_tensor);
  CHECK(decide(false, {false, false, false}) == comm_rule::host_tensor);
  CHECK(decide(true, {true, true, false}) == comm_rule::device_path);
  CHECK(decide(true, {true, false, true}) == comm_rule::no_peer_access);
  CHECK(decide(true, {false, false, true}) == comm_rule::device_path);
  CHECK(decide(true, {false, true, false}) == comm_rule::no_rdma);
}

TEST_CASE("both sides see the same link", "[actors][comm]") {
  comm_router zero{rank_id{0}, forced(2)};
  comm_router one{rank_id{1}, forced(2)};
  comm_router two{rank_id{2}, forced(2)};
  CHECK(zero.link_to(rank_id{1}).same_node);
  CHECK(one.link_to(rank_id{0}).same_node);
  CHECK_FALSE(zero.link_to(rank_id{2}).same_node);
  CHECK_FALSE(two.link_to(rank_id{1}).same_node);
  CHECK(two.link_to(rank_id{3}).same_node);
  CHECK(zero.link_to(rank_id{1}).peer_access);
  CHECK_FALSE(zero.link_to(rank_id{0}).peer_access); // nothing to choose
  comm_router plain{rank_id{0}, {}};
  CHECK(plain.link_to(rank_id{7}).same_node);
  CHECK(plain.rule_for({}, rank_id{1}) == comm_rule::host_tensor);
  CHECK(plain.rule_for({1, 0}, rank_id{1}) == comm_rule::no_peer_access);
}

TEST_CASE("the ranks of a machine are a node, unless it is said otherwise",
          "[actors][comm]") {
  auto same_node = [](uint64_t ranks_per_node, uint64_t self, uint64_t peer) {
    comm_router x{rank_id{self}, forced(ranks_per_node)};
    x.place({0, 1, 0, 1});
    auto link = x.link_to(rank_id{peer});
    CHECK(link.peer_access == link.same_node);
    CHECK(link.rdma != link.same_node);
    return link.same_node;
  };
  CHECK(same_node(0, 0, 2));
  CHECK(same_node(0, 3, 1));
  CHECK_FALSE(same_node(0, 0, 1));
  CHECK_FALSE(same_node(0, 1, 0));
  CHECK_FALSE(same_node(2, 0, 2));
  CHECK(same_node(2, 0, 1));
  CHECK(same_node(4, 0, 1));
}

TEST_CASE("on the host path no stage has to take a turn", "[actors][comm]") {
  staged_rank x;
  x.send({make_tensor(100 * kb, 1), make_tensor(10, 2)});
  CHECK(x.path.empty());
  REQUIRE(x.below->held.size() == 1);
  CHECK(x.below->held[0].transfers.empty());
  CHECK(x.sent(comm_rule::host_tensor) == 1);
  auto now = x.stages.status();
  CHECK_FALSE(now.device_path);
  CHECK(now.receive_arena.capacity == 0);
  REQUIRE(now.oldest.size() == 1);
  CHECK(now.oldest[0].at == comm_stage::tracker);
  CHECK(now.oldest[0].waits_for == "rank 1 to take its bytes");
  CHECK(x.stages.status_of(comm_stage::tracker).held == 1);
  x.below->leave();
  CHECK(x.ends == std::vector<failure>{{}});
  x.below->arrive(rank_id{1}, make_message("y", {make_tensor(100 * kb, 1)}));
  CHECK(x.delivered.size() == 1);
  for (auto& y : x.stages.status().stages) {
    CAPTURE(to_string(y.stage));
    auto copies = y.stage == comm_stage::preprocessing
                  || y.stage == comm_stage::postprocessing;
    auto works = y.stage == comm_stage::initiator
                 || y.stage == comm_stage::requester
                 || y.stage == comm_stage::tracker;
    CHECK(y.passed_by == (copies ? 1 : 0));
    CHECK(y.handled == (works ? 1 : 0));
    CHECK(y.bytes == (works ? 100 * kb + 11 : 0));
    CHECK(y.held == 0);
  }
  CHECK(x.below->places == nullptr);
}

TEST_CASE("on a node tensors go where the receiver has space",
          "[actors][comm]") {
  staged_rank x{forced(0)};
  x.send({make_tensor(10, 1), make_tensor(100 * kb, 2)});
  CHECK(x.path.empty());
  CHECK(x.stages.status().oldest[0].at == comm_stage::d2d_send);
  CHECK(x.stages.status_of(comm_stage::d2d_allocator).passed_by == 1);
  REQUIRE(x.below->held.size() == 1);
  auto transfers = x.below->held[0].transfers;
  REQUIRE(transfers.size() == 2);
  CHECK(transfers[0] == 0);
  CHECK(transfers[1] != 0);
  x.below->leave();
  CHECK(x.ends == std::vector<failure>{{}});
  // Which rule decided is known when the receiver told its choice.
  CHECK(x.sent(comm_rule::device_path) == 0);
  x.below->places->placed(rank_id{2}, transfers[1], true); // not the receiver
  x.below->places->placed(rank_id{1}, 12345, true); // no tensor of this rank
  x.below->places->placed(rank_id{1}, transfers[1], true);
  x.below->places->placed(rank_id{1}, transfers[1], true);
  CHECK(x.sent(comm_rule::device_path) == 1);
  // Nothing was copied here.
  CHECK(x.stages.status().send_arena.high_water == 0);
}

TEST_CASE("a receiver without space decides for the host path of both",
          "[actors][comm][R46]") {
  staged_rank x{forced(0)};
  x.send({make_tensor(100 * kb, 2)});
  auto name = x.below->held[0].transfers[0];
  x.below->leave();
  x.below->places->placed(rank_id{1}, name, false);
  CHECK(x.sent(comm_rule::no_space) == 1);
  CHECK(x.sent(comm_rule::device_path) == 0);

  staged_rank y{forced(0), 1};
  auto held = y.below->places->place({rank_id{0}, 1, 200 * kb});
  CHECK(held);
  CHECK(y.below->places->place({rank_id{0}, 2, 200 * kb}) == nullptr);
  CHECK(y.received(comm_rule::device_path) == 1);
  CHECK(y.received(comm_rule::no_space) == 1);
  CHECK(y.stages.status().receive_arena.refused == 1);
}

TEST_CASE("to another node tensors are sent from the send arena",
          "[actors][comm]") {
  staged_rank x{forced(1)};
  auto tensor = make_tensor(100 * kb, 2);
  x.send({tensor});
  CHECK(x.below->held.empty());
  CHECK(x.stages.status().oldest[0].at == comm_stage::cross_node_progress);
  x.run();
  CHECK(x.path == std::vector{comm_stage::cross_node_progress});
  REQUIRE(x.below->held.size() == 1);
  auto& out = x.below->held[0].content.body.tensors[0];
  CHECK(in_arena(x.below->registered[0], out));
  CHECK(same_bytes(out, pattern(100 * kb, 2)));
  CHECK(x.stages.status().oldest[0].at == comm_stage::io_send_watcher);
  CHECK(x.stages.status().send_arena.used == 128 * kb);
  x.below->leave();
  CHECK(x.stages.status().send_arena.used == 0);
  CHECK(x.stages.status_of(comm_stage::io_send_watcher).handled == 1);
}

TEST_CASE("without space in the send arena a tensor takes the host path",
          "[actors][comm][R46]") {
  staged_rank x{forced(1)};
  x.send({make_tensor(200 * kb, 1)});
  // One finds space, the other does not; then none does.
  x.send({make_tensor(200 * kb, 2)});
  CHECK(x.path == std::vector{comm_stage::cross_node_progress});
  REQUIRE(x.below->held.size() == 1);
  CHECK(x.below->held[0].transfers.empty());
  x.run();
  REQUIRE(x.below->held.size() == 2);
  CHECK(x.sent(comm_rule::no_space) == 1);
  CHECK(x.stages.status_of(comm_stage::requester).handled == 1);
  CHECK(x.stages.status_of(comm_stage::preprocessing).passed_by == 1);
  x.below->leave();
  x.below->leave();
  x.send({make_tensor(200 * kb, 3), make_tensor(200 * kb, 4)});
  x.run();
  REQUIRE(x.below->held.size() == 1);
  auto& transfers = x.below->held[0].transfers;
  CHECK(transfers[0] != 0);
  CHECK(transfers[1] == 0);
}

TEST_CASE("what came lies in the arena, unless that is crowded",
          "[actors][comm]") {
  auto same_node = GENERATE(true, false);
  staged_rank x{forced(same_node ? 0 : 1), 1};
  auto copies = same_node ? comm_stage::d2d_recv
                          : comm_stage::cross_node_progress;
  arrive_placed(x, 0, 100 * kb, 1);
  CHECK(x.path.empty());
  CHECK(x.stages.status_of(copies).passed_by == 1);
  REQUIRE(x.delivered.size() == 1);
  auto first = x.delivered[0].body.tensors[0];
  x.delivered.clear();
  CHECK(same_bytes(first, pattern(100 * kb, 1)));
  CHECK(in_arena(x.below->registered[1], first));
  arrive_placed(x, 0, 100 * kb, 2);
  CHECK(x.delivered.empty());
  x.run();
  CHECK(x.path == std::vector{copies});
  REQUIRE(x.delivered.size() == 1);
  auto second = x.delivered[0].body.tensors[0];
  CHECK(same_bytes(second, pattern(100 * kb, 2)));
  CHECK_FALSE(in_arena(x.below->registered[1], second));
  CHECK(x.stages.status().receive_arena.used == 128 * kb);
  CHECK(x.stages.status().receive_arena.high_water == 256 * kb);
  CHECK(x.stages.status_of(copies).handled == 1);
  CHECK(x.stages.status_of(comm_stage::io_recv_watcher).handled
        == (same_node ? 0 : 2));
}

TEST_CASE("a stopped rank holds up what is sent to it, within the window",
          "[actors][comm]") {
  staged_rank x;
  for (int i = 0; i < 12; ++i)
    x.send({make_tensor(100 * kb, 1)});
  x.send({make_tensor(100 * kb, 1)}, 2);
  CHECK(x.below->held.size() == 9);
  CHECK(x.stages.queued_to(rank_id{1}) == 4);
  CHECK(x.stages.status_of(comm_stage::requester).held == 4);
  CHECK(x.stages.status().oldest[8].waits_for
        == "room in the window of rank 1");
  // It is lost: all fail with that, one after the other.
  x.below->refuses = lost;
  while (!x.below->held.empty())
    x.below->leave(0, lost);
  CHECK(x.ends.size() == 13);
  CHECK(x.stages.queued_to(rank_id{1}) == 0);
  CHECK(x.stages.status().oldest.empty());
  // Each fails before the next one goes, not within it.
  CHECK(x.below->deepest == 1);
}

TEST_CASE("whatever is not sent at the end fails", "[actors][comm]") {
  staged_rank x;
  for (int i = 0; i < 10; ++i)
    x.send({make_tensor(100 * kb, 1)});
  x.stages.stop(std::chrono::milliseconds{0});
  REQUIRE(x.ends.size() == 2);
  CHECK(x.ends[0].code == error_code::cancelled);
  CHECK(x.stages.queued_to(rank_id{1}) == 0);
  // What comes later is for the fabric below to refuse.
  x.send({make_tensor(100 * kb, 1)});
  CHECK(x.below->held.size() == 9);
  staged_rank y{forced(1)};
  y.send({make_tensor(100 * kb, 1)});
  y.turns.clear();
  REQUIRE(y.ends.size() == 1);
  CHECK(y.ends[0].code == error_code::cancelled);
}

TEST_CASE("a lost rank tells no choices any more", "[actors][comm]") {
  staged_rank x{forced(0)};
  x.send({make_tensor(100 * kb, 1)});
  x.send({make_tensor(100 * kb, 2)});
  auto first = x.below->held[0].transfers[0];
  auto second = x.below->held[1].transfers[0];
  x.below->leave(0, lost);
  x.below->leave();
  x.stages.peer_lost(lost);
  x.below->places->placed(rank_id{1}, first, true);
  x.below->places->placed(rank_id{1}, second, true);
  CHECK(x.sent(comm_rule::device_path) == 0);
}
