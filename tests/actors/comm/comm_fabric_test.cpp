// ctest: processors=2

#include "tests/support/catch.hpp"

#include "actors/comm/comm_fabric.hpp"
#include "tests/support/actors/comm_world.hpp"
#include "tests/support/actors/payloads.hpp"
#include "tests/support/actors/staged_rank.hpp"
#include "tests/support/runs/resident_pages.hpp"

#include <memory>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

using namespace smp;
using namespace smp::test;

namespace {

constexpr uint64_t kb = 1024;
constexpr uint64_t mb = 1024 * kb;

comm_options forced(uint64_t ranks_per_node, uint64_t arena) {
  comm_options result;
  result.force_device_path = true;
  result.send_arena = arena;
  result.receive_arena = arena;
  result.ranks_per_node = ranks_per_node;
  return result;
}

#define ON_EVERY_FABRIC                                                        \
  auto kind = GENERATE(as<std::string>{}, "loopback", "shm", "tcp");           \
  CAPTURE(kind)

} // namespace

TEST_CASE("messages of every size pass the stages whole, on every path",
          "[actors][comm]") {
  ON_EVERY_FABRIC;
  // 0: host path, 1: device path on a node, 2: between nodes
  auto path = GENERATE(0, 1, 2);
  CAPTURE(path);
  auto options = path == 0 ? comm_options{}
                           : forced(path == 1 ? 0 : 1, 64 * mb);
  comm_world w{kind, 2, options};
  std::vector<uint64_t> sizes{0,     1,       4096,    4097,
                              70000, 1 << 20, 5 << 20, 80 << 20};
  for (auto size : sizes)
    w.at(0).send(rank_id{1},
                 make_message(std::to_string(size), {make_tensor(size, size)}),
                 w.heard(0).on_sent());
  REQUIRE(w.heard(1).wait_messages(sizes.size()));
  REQUIRE(w.heard(0).wait_sent(sizes.size()));
  CHECK(w.heard(0).send_failures().empty());
  std::set<uint64_t> seen;
  for (auto& [from, x] : w.heard(1).take_messages()) {
    auto size = std::stoull(to_text(x.body.bytes));
    CHECK(same_bytes(x.body.tensors[0], pattern(size, size)));
    seen.insert(size);
  }
  CHECK(seen == std::set<uint64_t>(sizes.begin(), sizes.end()));
  auto sender = path == 0 ? w.at(0).status() : when_placed(w.at(0), 5);
  auto receiver = w.at(1).status();
  CHECK(handled(sender, comm_stage::initiator) == 5);
  if (path == 0) {
    CHECK(by_rule(sender.sent, comm_rule::host_tensor) == 5);
    CHECK(handled(sender, comm_stage::tracker) == 5);
    CHECK(handled(sender, comm_stage::d2d_allocator) == 0);
    return;
  }
  // The largest finds no space in an arena of 64 MB, all others do.
  CHECK(by_rule(sender.sent, comm_rule::device_path) == 4);
  CHECK(by_rule(sender.sent, comm_rule::no_space) == 1);
  CHECK(by_rule(receiver.received, comm_rule::device_path) == 4);
  // What came while the arena was nearly full was copied out of it.
  auto copies = path == 1 ? comm_stage::d2d_recv
                          : comm_stage::cross_node_progress;
  CHECK(handled(receiver, copies) + passed_by(receiver, copies) == 4);
  if (path == 1) {
    CHECK(passed_by(sender, comm_stage::d2d_allocator) == 5);
    CHECK(handled(sender, comm_stage::d2d_send) == 5);
    CHECK(by_rule(receiver.received, comm_rule::no_space) == 1);
  } else {
    CHECK(handled(receiver, comm_stage::io_recv_watcher) == 4);
    CHECK(handled(sender, comm_stage::d2d_allocator) == 5);
    CHECK(handled(sender, comm_stage::cross_node_progress) == 4);
    CHECK(handled(sender, comm_stage::io_send_watcher) == 4);
    CHECK(handled(sender, comm_stage::requester) == 1);
  }
}

TEST_CASE("between machines a tensor goes through both arenas",
          "[actors][comm]") {
  comm_world w{"tcp", 3, forced(0, 4 * mb), {0, 1, 0}};
  for (uint64_t to : {1, 2})
    w.at(0).send(rank_id{to}, make_message("x", {make_tensor(mb, 1)}), {});
  for (uint64_t to : {1, 2})
    REQUIRE(w.heard(to).wait_messages(1));
  auto sender = when_placed(w.at(0), 2);
  CHECK(handled(sender, comm_stage::cross_node_progress) == 1);
  CHECK(handled(sender, comm_stage::d2d_send) == 1);
  CHECK(sender.send_arena.high_water == mb);
  CHECK(handled(w.at(1).status(), comm_stage::io_recv_watcher) == 1);
  CHECK(handled(w.at(2).status(), comm_stage::io_recv_watcher) == 0);
}

TEST_CASE("arenas are touched and registered before a run begins",
          "[actors][comm]") {
  auto below = std::make_shared<held_fabric>();
  auto options = forced(0, 4 * mb);
  options.send_arena = 2 * mb;
  SECTION("both of them") {
    comm_fabric x{below, std::make_shared<actor_host>(),
                  std::make_shared<rank_board>(rank_id{0}, 1), options};
    REQUIRE(below->registered.size() == 2);
    CHECK(below->registered[0].second == 2 * mb);
    CHECK(below->registered[1].second == 4 * mb);
    for (auto& [memory, size] : below->registered)
      CHECK(untouched_pages(memory.get(), size) == 0);
  }
  SECTION("unless there is none") {
    options.force_device_path = false;
    comm_fabric x{below, std::make_shared<actor_host>(),
                  std::make_shared<rank_board>(rank_id{0}, 1), options};
    CHECK(below->registered.empty());
  }
}

TEST_CASE("an arena that is too small is not a stall", "[actors][comm]") {
  ON_EVERY_FABRIC;
  auto per_node = GENERATE(0u, 1u);
  CAPTURE(per_node);
  comm_world w{kind, 3, forced(per_node, mb)};
  constexpr uint64_t count = 60;
  // Whether those that fit find the arena full is for threads to decide; one
  // that does not fit is refused for sure.
  auto size_of = [](uint64_t i) {
    return i == count / 2 ? 3 * mb : 5000 + i * 9973 % (700 * kb);
  };
  for (uint64_t i = 0; i < count; ++i)
    for (uint64_t from : {0, 2})
      w.at(from).send(
        rank_id{1},
        make_message(std::to_string(i),
                     {make_tensor(size_of(i), i), make_tensor(100, i)}),
        {});
  // Held all the time, so that the arena stays full.
  REQUIRE(w.heard(1).wait_messages(2 * count));
  for (auto& [from, x] : w.heard(1).messages()) {
    auto i = std::stoull(to_text(x.body.bytes));
    REQUIRE(same_bytes(x.body.tensors[0], pattern(size_of(i), i)));
    REQUIRE(same_bytes(x.body.tensors[1], pattern(100, i)));
  }
  auto now = w.at(1).status();
  CHECK(now.receive_arena.high_water > mb / 2);
  // Between nodes the sender has no space for the one that does not fit, so the
  // receiver is not asked.
  if (per_node == 0)
    CHECK(now.receive_arena.refused > 0);
  else
    CHECK(w.at(0).status().send_arena.refused > 0);
  w.heard(1).take_messages();
}

TEST_CASE("all ranks send to all on mixed paths", "[actors][comm]") {
  ON_EVERY_FABRIC;
  comm_world w{kind, 4, forced(2, 8 * mb)};
  constexpr uint64_t rounds = 30;
  std::vector<std::thread> threads;
  for (uint64_t me = 0; me < 4; ++me)
    threads.emplace_back([&w, me] {
      for (uint64_t i = 0; i < rounds; ++i)
        for (uint64_t to = 0; to < 4; ++to)
          w.at(me).send(
            rank_id{to},
            make_message(std::to_string(i), {make_tensor(i * 20011, me + i)}),
            w.heard(me).on_sent());
    });
  for (auto& t : threads)
    t.join();
  for (uint64_t me = 0; me < 4; ++me) {
    REQUIRE(w.heard(me).wait_messages(4 * rounds));
    REQUIRE(w.heard(me).wait_sent(4 * rounds));
    CHECK(w.heard(me).send_failures().empty());
    for (auto& [from, x] : w.heard(me).take_messages()) {
      auto i = std::stoull(to_text(x.body.bytes));
      REQUIRE(
        same_bytes(x.body.tensors[0], pattern(i * 20011, from.value + i)));
    }
  }
}

TEST_CASE("a loss reaches what is on its way through the stages",
          "[actors][comm]") {
  ON_EVERY_FABRIC;
  auto device = GENERATE(false, true);
  CAPTURE(device);
  comm_world w{kind, 3, device ? forced(1, 4 * mb) : comm_options{}};
  failure gone{error_code::rank_down, rank_id{1}, {}, "killed by signal 9"};
  auto tensor = make_tensor(mb, 1);
  for (int i = 0; i < 40; ++i)
    w.at(0).send(rank_id{1}, make_message("x", {tensor}), w.heard(0).on_sent());
  w.at(0).peer_lost(gone);
  REQUIRE(w.heard(0).wait_losses(1));
  REQUIRE(w.heard(0).wait_sent(40));
  for (auto& x : w.heard(0).send_failures())
    CHECK(x == gone);
  CHECK(w.at(0).queued_to(rank_id{1}) == 0);
  w.at(0).send(rank_id{2}, make_message("on", {tensor}), {});
  CHECK(w.heard(2).wait_messages(1));
}

TEST_CASE("a stop sends what is in the stages", "[actors][comm]") {
  ON_EVERY_FABRIC;
  auto device = GENERATE(false, true);
  CAPTURE(device);
  comm_world w{kind, 2, device ? forced(1, 64 * mb) : comm_options{}};
  for (int i = 0; i < 30; ++i)
    w.at(0).send(rank_id{1}, make_message("x", {make_tensor(mb, 1)}),
                 w.heard(0).on_sent());
  w.at(0).stop(std::chrono::seconds{30});
  CHECK(w.heard(0).sent() == 30);
  CHECK(w.heard(0).send_failures().empty());
  CHECK(w.heard(1).wait_messages(30));
  w.at(0).send(rank_id{1}, make_message("late", {make_tensor(mb, 1)}),
               w.heard(0).on_sent());
  REQUIRE(w.heard(0).wait_sent(31));
  CHECK(w.heard(0).send_failures()[0].code == error_code::cancelled);
}
