#include "tests/support/catch.hpp"

#include "actors/comm/comm_core.hpp"
#include "tests/support/actors/payloads.hpp"

#include <deque>
#include <optional>
#include <string>
#include <utility>
#include <vector>

using namespace smp;
using namespace smp::test;

namespace {

constexpr uint64_t kb = 1024;

/// A rank whose stages take their turns when the test says so.
struct stages : comm_outside {
  explicit stages(comm_options x = {}, uint64_t self = 0)
    : core(rank_id{self}, x, *this) {
    // nop
  }

  void hand_over(comm_stage to, comm_message_ptr x) override {
    path.push_back(to);
    turns.emplace_back(to, std::move(x));
  }

  void launch(const comm_message_ptr& x,
              std::vector<uint64_t> transfers) override {
    if (refuses)
      return core.left(x, *refuses);
    launched.emplace_back(x, std::move(transfers));
  }

  void deliver(rank_id from, message x) override {
    delivered.emplace_back(from, std::move(x));
  }

  void run() {
    while (!turns.empty()) {
      auto [at, x] = std::move(turns.front());
      turns.pop_front();
      core.handle(at, std::move(x));
    }
  }

  void send(std::vector<tensor_ref> tensors, uint64_t to = 1) {
    core.send(rank_id{to}, make_message("x", std::move(tensors)),
              [this](const failure& x) { ends.push_back(x); });
  }

  /// The oldest message that was launched leaves.
  comm_message_ptr leave(const failure& why = {}) {
    auto x = launched.front().first;
    launched.pop_front();
    core.left(x, why);
    return x;
  }

  /// A message of rank `from` that lies in the receive arena arrives.
  void arrive_placed(uint64_t from, uint64_t size, uint64_t name) {
    auto block = core.place({rank_id{from}, name, size});
    REQUIRE(block);
    auto bytes = pattern(size, name);
    std::copy(bytes.begin(), bytes.end(), block.get());
    auto t = make_tensor(size, name);
    t.data = block.get();
    t.owner = block;
    block.reset();
    core.arrived(rank_id{from}, make_message("x", {std::move(t)}));
  }

  uint64_t sent(comm_rule x) const {
    return core.status().sent[static_cast<size_t>(x)];
  }

  uint64_t received(comm_rule x) const {
    return core.status().received[static_cast<size_t>(x)];
  }

  /// First: messages that are left at the end tell it too.
  std::vector<failure> ends;
  std::deque<std::pair<comm_stage, comm_message_ptr>> turns;
  std::deque<std::pair<comm_message_ptr, std::vector<uint64_t>>> launched;
  std::vector<std::pair<rank_id, message>> delivered;
  std::vector<comm_stage> path;
  std::optional<failure> refuses;
  comm_core core;
};

comm_options forced(uint64_t ranks_per_node) {
  comm_options result;
  result.force_device_path = true;
  result.send_arena = 256 * kb;
  result.receive_arena = 256 * kb;
  result.ranks_per_node = ranks_per_node;
  return result;
}

const failure lost{error_code::rank_down, rank_id{1}, {}, "killed"};

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
  stages x;
  x.send({make_tensor(100 * kb, 1), make_tensor(10, 2)});
  CHECK(x.path.empty());
  REQUIRE(x.launched.size() == 1);
  CHECK(x.launched[0].second.empty());
  CHECK(x.sent(comm_rule::host_tensor) == 1);
  auto now = x.core.status();
  CHECK_FALSE(now.device_path);
  CHECK(now.receive_arena.capacity == 0);
  REQUIRE(now.oldest.size() == 1);
  CHECK(now.oldest[0].at == comm_stage::tracker);
  CHECK(now.oldest[0].waits_for == "rank 1 to take its bytes");
  CHECK(x.core.status_of(comm_stage::tracker).held == 1);
  x.leave();
  CHECK(x.ends == std::vector<failure>{{}});
  x.core.arrived(rank_id{1}, make_message("y", {make_tensor(100 * kb, 1)}));
  CHECK(x.delivered.size() == 1);
  for (auto& y : x.core.status().stages) {
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
  CHECK(x.core.place({rank_id{1}, 5, kb}) == nullptr);
}

TEST_CASE("on a node tensors go where the receiver has space",
          "[actors][comm]") {
  stages x{forced(0)};
  x.send({make_tensor(10, 1), make_tensor(100 * kb, 2)});
  CHECK(x.path.empty());
  CHECK(x.core.status().oldest[0].at == comm_stage::d2d_send);
  CHECK(x.core.status_of(comm_stage::d2d_allocator).passed_by == 1);
  REQUIRE(x.launched.size() == 1);
  auto transfers = x.launched[0].second;
  REQUIRE(transfers.size() == 2);
  CHECK(transfers[0] == 0);
  CHECK(transfers[1] != 0);
  auto m = x.leave();
  CHECK(x.ends == std::vector<failure>{{}});
  // Which rule decided is known when the receiver told its choice.
  CHECK(x.sent(comm_rule::device_path) == 0);
  x.core.placed({rank_id{2}, transfers[1], true}); // not the receiver
  x.core.placed({rank_id{1}, 12345, true});        // no tensor of this rank
  x.core.placed({rank_id{1}, transfers[1], true});
  x.core.placed({rank_id{1}, transfers[1], true});
  CHECK(x.sent(comm_rule::device_path) == 1);
  CHECK(m->tensors[0].rule == comm_rule::device_path);
  // Nothing was copied here.
  CHECK(x.core.status().send_arena.high_water == 0);
}

TEST_CASE("a receiver without space decides for the host path of both",
          "[actors][comm][R46]") {
  stages x{forced(0)};
  x.send({make_tensor(100 * kb, 2)});
  auto name = x.launched[0].second[0];
  auto m = x.leave();
  x.core.placed({rank_id{1}, name, false});
  CHECK(x.sent(comm_rule::no_space) == 1);
  CHECK(x.sent(comm_rule::device_path) == 0);
  CHECK(m->tensors[0].rule == comm_rule::no_space);

  stages y{forced(0), 1};
  auto held = y.core.place({rank_id{0}, 1, 200 * kb});
  CHECK(held);
  CHECK(y.core.place({rank_id{0}, 2, 200 * kb}) == nullptr);
  CHECK(y.received(comm_rule::device_path) == 1);
  CHECK(y.received(comm_rule::no_space) == 1);
  CHECK(y.core.status().receive_arena.refused == 1);
}

TEST_CASE("to another node tensors are sent from the send arena",
          "[actors][comm]") {
  stages x{forced(1)};
  auto tensor = make_tensor(100 * kb, 2);
  x.send({tensor});
  CHECK(x.launched.empty());
  CHECK(x.core.status().oldest[0].at == comm_stage::cross_node_progress);
  x.run();
  CHECK(x.path == std::vector{comm_stage::cross_node_progress});
  REQUIRE(x.launched.size() == 1);
  auto& out = x.launched[0].first->content.body.tensors[0];
  CHECK(x.core.send_arena()->contains(out.data));
  CHECK(same_bytes(out, pattern(100 * kb, 2)));
  CHECK(x.core.status().oldest[0].at == comm_stage::io_send_watcher);
  CHECK(x.core.status().send_arena.used == 128 * kb);
  x.leave();
  CHECK(x.core.status().send_arena.used == 0);
  CHECK(x.core.status_of(comm_stage::io_send_watcher).handled == 1);
}

TEST_CASE("without space in the send arena a tensor takes the host path",
          "[actors][comm][R46]") {
  stages x{forced(1)};
  x.send({make_tensor(200 * kb, 1)});
  // One finds space, the other does not; then none does.
  x.send({make_tensor(200 * kb, 2)});
  CHECK(x.path == std::vector{comm_stage::cross_node_progress});
  REQUIRE(x.launched.size() == 1);
  CHECK(x.launched[0].second.empty());
  x.run();
  REQUIRE(x.launched.size() == 2);
  CHECK(x.sent(comm_rule::no_space) == 1);
  CHECK(x.core.status_of(comm_stage::requester).handled == 1);
  CHECK(x.core.status_of(comm_stage::preprocessing).passed_by == 1);
  x.leave();
  x.leave();
  x.send({make_tensor(200 * kb, 3), make_tensor(200 * kb, 4)});
  x.run();
  REQUIRE(x.launched.size() == 1);
  auto& transfers = x.launched[0].second;
  CHECK(transfers[0] != 0);
  CHECK(transfers[1] == 0);
}

TEST_CASE("what came lies in the arena, unless that is crowded",
          "[actors][comm]") {
  auto same_node = GENERATE(true, false);
  stages x{forced(same_node ? 0 : 1), 1};
  auto copies = same_node ? comm_stage::d2d_recv
                          : comm_stage::cross_node_progress;
  x.arrive_placed(0, 100 * kb, 1);
  CHECK(x.path.empty());
  CHECK(x.core.status_of(copies).passed_by == 1);
  REQUIRE(x.delivered.size() == 1);
  auto first = x.delivered[0].second.body.tensors[0];
  x.delivered.clear();
  CHECK(same_bytes(first, pattern(100 * kb, 1)));
  CHECK(x.core.receive_arena()->contains(first.data));
  x.arrive_placed(0, 100 * kb, 2);
  CHECK(x.delivered.empty());
  x.run();
  CHECK(x.path == std::vector{copies});
  REQUIRE(x.delivered.size() == 1);
  auto second = x.delivered[0].second.body.tensors[0];
  CHECK(same_bytes(second, pattern(100 * kb, 2)));
  CHECK_FALSE(x.core.receive_arena()->contains(second.data));
  CHECK(x.core.status().receive_arena.used == 128 * kb);
  CHECK(x.core.status().receive_arena.high_water == 256 * kb);
  CHECK(x.core.status_of(copies).handled == 1);
  CHECK(x.core.status_of(comm_stage::io_recv_watcher).handled
        == (same_node ? 0 : 2));
}

TEST_CASE("a stopped rank holds up what is sent to it, within the window",
          "[actors][comm]") {
  stages x;
  for (int i = 0; i < 12; ++i)
    x.send({make_tensor(100 * kb, 1)});
  x.send({make_tensor(100 * kb, 1)}, 2);
  CHECK(x.launched.size() == 9);
  CHECK(x.core.queued_to(rank_id{1}) == 4);
  CHECK(x.core.status_of(comm_stage::requester).held == 4);
  CHECK(x.core.status().oldest[8].waits_for == "room in the window of rank 1");
  // It is lost: all fail with that, one after the other.
  x.refuses = lost;
  while (!x.launched.empty())
    x.leave(lost);
  CHECK(x.ends.size() == 13);
  CHECK(x.core.queued_to(rank_id{1}) == 0);
  CHECK(x.core.drain({}));
}

TEST_CASE("whatever is not sent at the end fails", "[actors][comm]") {
  stages x;
  for (int i = 0; i < 10; ++i)
    x.send({make_tensor(100 * kb, 1)});
  CHECK_FALSE(x.core.drain({}));
  x.core.close(lost);
  CHECK(x.ends == std::vector<failure>{lost, lost});
  stages y{forced(1)};
  y.send({make_tensor(100 * kb, 1)});
  y.turns.clear();
  REQUIRE(y.ends.size() == 1);
  CHECK(y.ends[0].code == error_code::cancelled);
}

TEST_CASE("a lost rank tells no choices any more", "[actors][comm]") {
  stages x{forced(0)};
  x.send({make_tensor(100 * kb, 1)});
  x.send({make_tensor(100 * kb, 2)});
  auto first = x.launched[0].second[0];
  auto second = x.launched[1].second[0];
  x.leave(lost);
  x.leave();
  x.core.peer_lost(rank_id{1});
  x.core.placed({rank_id{1}, first, true});
  x.core.placed({rank_id{1}, second, true});
  CHECK(x.sent(comm_rule::device_path) == 0);
}
