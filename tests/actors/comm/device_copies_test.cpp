// ctest: processors=2

#include "tests/support/catch.hpp"

#include "tests/support/actors/comm_world.hpp"
#include "tests/support/actors/payloads.hpp"
#include "tests/support/actors/simulated_device.hpp"
#include "tests/support/actors/staged_rank.hpp"

#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

using namespace smp;
using namespace smp::test;
using Catch::Matchers::ContainsSubstring;

namespace {

constexpr uint64_t kb = 1024;
constexpr uint64_t mb = 1024 * kb;

/// What decides about tensors on a device, and which stages have to see them.
struct way {
  comm_rule rule;
  device_reach reach;
  uint64_t ranks_per_node;
  std::vector<comm_stage> out;
  std::vector<comm_stage> in;
};

way way_of(comm_rule rule, bool same_node) {
  using enum comm_stage;
  uint64_t per_node = same_node ? 0 : 1;
  // The other link must not count.
  if (rule != comm_rule::device_path)
    return {rule,
            {!same_node, same_node},
            per_node,
            {preprocessing, requester, tracker},
            {postprocessing}};
  if (same_node)
    return {
      rule, {true, false}, per_node, {d2d_allocator, d2d_send}, {d2d_recv}};
  return {rule,
          {false, true},
          per_node,
          {d2d_allocator, cross_node_progress, io_send_watcher},
          {io_recv_watcher, cross_node_progress}};
}

way host_path() {
  return way_of(comm_rule::no_peer_access, true);
}

const std::vector<way>& ways() {
  static const std::vector<way> result{host_path(),
                                       way_of(comm_rule::no_rdma, false),
                                       way_of(comm_rule::device_path, true),
                                       way_of(comm_rule::device_path, false)};
  return result;
}

/// Two ranks with a device each.
struct two_devices {
  explicit two_devices(const way& x) {
    for (int16_t i = 0; i < 2; ++i) {
      all.push_back(std::make_shared<simulated_device>(i, x.reach));
      comm_options mine;
      mine.ranks_per_node = x.ranks_per_node;
      mine.send_arena = 16 * mb;
      mine.receive_arena = 16 * mb;
      mine.device_arena = 16 * mb;
      mine.devices = all.back();
      options.push_back(mine);
    }
  }

  tensor_ref make(uint64_t size, uint64_t seed) {
    auto result = all[0]->place(make_tensor(size, seed));
    all[0]->write(result, pattern(size, seed));
    return result;
  }

  bool holds(size_t rank, const tensor_ref& x,
             const std::vector<std::byte>& bytes) {
    device_ref mine{simulated_device::type, static_cast<int16_t>(rank)};
    return x.device == mine && x.home == device_ref{}
           && x.nbytes == bytes.size() && all[rank]->read(x) == bytes;
  }

  std::vector<std::shared_ptr<simulated_device>> all;
  std::vector<comm_options> options;
};

/// @returns whether a stage got to its first message.
bool begins(comm_fabric& x, comm_stage stage) {
  auto deadline = std::chrono::steady_clock::now() + patience;
  while (handled(x.status(), stage) == 0) {
    if (std::chrono::steady_clock::now() > deadline)
      return false;
    std::this_thread::yield();
  }
  return true;
}

#define ON_EVERY_FABRIC                                                        \
  auto kind = GENERATE(as<std::string>{}, "loopback", "shm", "tcp");           \
  CAPTURE(kind)

#define ON_EVERY_WAY                                                           \
  auto number = GENERATE(range(size_t{0}, size_t{4}));                         \
  auto& x = ways()[number];                                                    \
  CAPTURE(number)

} // namespace

TEST_CASE("what lies on a device comes to lie on that of the other rank",
          "[actors][comm][device]") {
  ON_EVERY_FABRIC;
  ON_EVERY_WAY;
  two_devices d{x};
  comm_world w{kind, d.options};
  std::vector<uint64_t> sizes{0, 1, 4096, 4097, 70000, 1 << 20, 5 << 20};
  constexpr uint64_t large = 4;
  for (auto size : sizes)
    w.at(0).send(rank_id{1},
                 make_message(std::to_string(size), {d.make(size, size)}),
                 w.heard(0).on_sent());
  REQUIRE(w.heard(1).wait_messages(sizes.size()));
  REQUIRE(w.heard(0).wait_sent(sizes.size()));
  CHECK(w.heard(0).send_failures().empty());
  for (auto& [from, m] : w.heard(1).take_messages()) {
    auto size = std::stoull(to_text(m.body.bytes));
    CAPTURE(size);
    CHECK(d.holds(1, m.body.tensors[0], pattern(size, size)));
  }
  auto on_device_path = x.rule == comm_rule::device_path;
  auto sender = on_device_path ? when_placed(w.at(0), large) : w.at(0).status();
  auto receiver = w.at(1).status();
  CHECK(by_rule(sender.sent, x.rule) == large);
  CHECK(by_rule(receiver.received, comm_rule::device_path)
        == (on_device_path ? large : 0));
  // Over the fabric or past it.
  CHECK(w.at(0).stats().bytes_sent >= uint64_t{6} << 20);
  CHECK(w.at(1).stats().bytes_received >= uint64_t{6} << 20);
  // Small ones have no path to choose, but are copied as well.
  auto counted = on_device_path ? large : sizes.size();
  CHECK(handled(sender, comm_stage::initiator) == sizes.size());
  for (auto stage : x.out) {
    CAPTURE(to_string(stage));
    CHECK(handled(sender, stage) == counted);
  }
  for (auto stage : x.in) {
    CAPTURE(to_string(stage));
    CHECK(handled(receiver, stage) == counted);
  }
  auto by_host = on_device_path ? sizes.size() - large : sizes.size();
  CHECK(handled(sender, comm_stage::preprocessing) == by_host);
  CHECK(passed_by(sender, comm_stage::preprocessing) == 0);
  CHECK(handled(receiver, comm_stage::postprocessing) == by_host);
  CHECK(passed_by(receiver, comm_stage::postprocessing) == 0);
}

TEST_CASE("tensors of one message lie where each of them did",
          "[actors][comm][device]") {
  ON_EVERY_WAY;
  two_devices d{x};
  comm_world w{"loopback", d.options};
  w.at(0).send(rank_id{1},
               make_message("x", {make_tensor(70000, 1), d.make(70000, 2),
                                  make_tensor(10, 3), d.make(10, 4)}),
               {});
  w.at(0).send(rank_id{1}, make_message("y", {make_tensor(70000, 5)}), {});
  REQUIRE(w.heard(1).wait_messages(2));
  for (auto& [from, m] : w.heard(1).take_messages()) {
    auto& got = m.body.tensors;
    if (to_text(m.body.bytes) == "y") {
      CHECK(same_bytes(got[0], pattern(70000, 5)));
      continue;
    }
    REQUIRE(got.size() == 4);
    CHECK(got[0].device == device_ref{});
    CHECK(same_bytes(got[0], pattern(70000, 1)));
    CHECK(d.holds(1, got[1], pattern(70000, 2)));
    CHECK(got[2].device == device_ref{});
    CHECK(same_bytes(got[2], pattern(10, 3)));
    CHECK(d.holds(1, got[3], pattern(10, 4)));
  }
  // What is all in host memory is not copied here.
  CHECK(by_rule(w.at(0).status().sent, comm_rule::host_tensor) == 2);
  CHECK(passed_by(w.at(0).status(), comm_stage::preprocessing) == 1);
}

TEST_CASE("nobody reads a tensor before its bytes are there",
          "[actors][comm][device]") {
  auto on_host = GENERATE(false, true);
  CAPTURE(on_host);
  two_devices d{host_path()};
  comm_world w{"loopback", d.options};
  auto tensor = make_tensor(70000, 1);
  auto bytes = std::make_shared<std::vector<std::byte>>(70000);
  if (on_host) {
    tensor.data = bytes->data();
    tensor.owner = bytes;
  } else {
    tensor = d.all[0]->place(std::move(tensor));
  }
  auto ready = d.all[0]->make_event();
  tensor.ready = ready;
  w.at(0).send(rank_id{1}, make_message("x", {tensor}), {});
  REQUIRE(begins(w.at(0), comm_stage::preprocessing));
  d.all[0]->write(tensor, pattern(70000, 1));
  ready->happen();
  REQUIRE(w.heard(1).wait_messages(1));
  auto got = w.heard(1).take_messages()[0].second.body.tensors[0];
  if (on_host)
    CHECK(same_bytes(got, pattern(70000, 1)));
  else
    CHECK(d.holds(1, got, pattern(70000, 1)));
}

TEST_CASE("a tensor that is never ready is an error, and others go on",
          "[actors][comm][device]") {
  ON_EVERY_WAY;
  auto on_host = GENERATE(false, true);
  CAPTURE(on_host);
  two_devices d{x};
  d.options[0].device_patience = std::chrono::milliseconds{1};
  comm_world w{"loopback", d.options};
  auto late = on_host ? make_tensor(70000, 1) : d.make(70000, 1);
  late.ready = d.all[0]->make_event();
  w.at(0).send(rank_id{1}, make_message("x", {make_tensor(10, 2), late}),
               w.heard(0).on_sent());
  REQUIRE(w.heard(0).wait_sent(1));
  REQUIRE(w.heard(0).send_failures().size() == 1);
  auto why = w.heard(0).send_failures()[0];
  CHECK(why.code == error_code::transport);
  CHECK(why.rank == rank_id{0});
  CHECK(why.text
        == "tensor 1 of a message to rank 1, of "
             + std::string{on_host ? "host memory" : "device 20:0"}
             + ", is not ready after 1 ms");
  CHECK(w.at(0).status().oldest.empty());
  w.at(0).send(rank_id{1}, make_message("on", {make_tensor(70000, 1)}), {});
  REQUIRE(w.heard(1).wait_messages(1));
  CHECK(to_text(w.heard(1).messages()[0].second.body.bytes) == "on");
}

TEST_CASE("what leaves a device for several ranks is copied to the host once",
          "[actors][comm][device]") {
  two_devices d{host_path()};
  auto x = d.make(70000, 1);
  x.ready = d.all[0]->make_event();
  auto part = x, later = x;
  part.nbytes = 100;
  later.ready = d.all[0]->make_event();
  staged_rank rank{d.options[0]};
  auto copies_of = [&](const std::vector<tensor_ref>& xs, uint64_t to) {
    auto before = d.all[0]->copies();
    rank.send(xs, to);
    rank.run();
    return d.all[0]->copies() - before;
  };
  CHECK(copies_of({x}, 1) == 1);
  CHECK(copies_of({x}, 2) == 0);
  CHECK(copies_of({part, x, later}, 2) == 2);
  rank.stages.stop(std::chrono::milliseconds{0}); // none of it has left
  CHECK(rank.ends.size() == 3);
}

TEST_CASE("a rank whose device has failed blames no sender",
          "[actors][comm][device]") {
  ON_EVERY_WAY;
  two_devices d{x};
  comm_world w{"loopback", d.options};
  d.all[1]->fail();
  w.at(0).send(rank_id{1},
               make_message("x", {d.make(70000, 1), make_tensor(10, 2)}), {});
  // It can still say what happened.
  w.at(1).send(rank_id{0}, make_message("failed", {}), {});
  REQUIRE(w.heard(1).wait_messages(1));
  REQUIRE(w.heard(0).wait_messages(1));
  auto got = w.heard(1).take_messages()[0].second.body.tensors;
  CHECK(got[0].home == device_ref{simulated_device::type, 0});
  REQUIRE(got[0].unplaced);
  CHECK(got[0].unplaced->rank == rank_id{1});
  CHECK_THAT(got[0].unplaced->text,
             ContainsSubstring("70000 bytes could not be copied")
               && ContainsSubstring("a kernel has failed")
               && ContainsSubstring("smp.wait_for_device = true"));
  CHECK(same_bytes(got[1], pattern(10, 2)));
  CHECK(w.heard(1).losses().empty());
}

TEST_CASE("what the device of its sender does not give names the sender",
          "[actors][comm][device]") {
  two_devices d{way_of(comm_rule::device_path, true)};
  comm_world w{"loopback", d.options};
  d.all[1]->refuse({simulated_device::type, 0});
  w.at(0).send(rank_id{1}, make_message("x", {d.make(70000, 1)}), {});
  REQUIRE(w.heard(1).wait_messages(1));
  auto got = w.heard(1).take_messages()[0].second.body.tensors[0];
  REQUIRE(got.unplaced);
  CHECK(got.unplaced->rank == rank_id{0});
}

TEST_CASE("a stop does not wait for a device", "[actors][comm][device]") {
  two_devices d{host_path()};
  comm_world w{"loopback", d.options};
  auto late = d.make(70000, 1);
  late.ready = d.all[0]->make_event();
  for (int i = 0; i < 2; ++i)
    w.at(0).send(rank_id{1}, make_message("x", {late}), w.heard(0).on_sent());
  REQUIRE(begins(w.at(0), comm_stage::preprocessing));
  w.at(0).stop(std::chrono::milliseconds{0});
  REQUIRE(w.heard(0).wait_sent(2));
  REQUIRE(w.heard(0).send_failures().size() == 2);
  for (auto& why : w.heard(0).send_failures())
    CHECK(why.code == error_code::cancelled);
}

TEST_CASE("what gets to a device after the stop ends as well",
          "[actors][comm][device]") {
  two_devices d{host_path()};
  staged_rank x{d.options[0]};
  auto late = d.make(70000, 1);
  late.ready = d.all[0]->make_event();
  x.send({late});
  x.stages.stop(std::chrono::milliseconds{0});
  x.run();
  REQUIRE(x.ends.size() == 1);
  CHECK(x.ends[0].code == error_code::cancelled);
}

TEST_CASE("without space in an arena tensors of a device take the host path",
          "[actors][comm][device][R46]") {
  ON_EVERY_FABRIC;
  // In the arena of the sender, or of the receiver, which has none for its own
  // node.
  auto [same_node, at_sender] = GENERATE(values<std::pair<bool, bool>>(
    {{false, false}, {false, true}, {true, true}}));
  CAPTURE(same_node, at_sender);
  two_devices d{way_of(comm_rule::device_path, same_node)};
  auto& small = d.options[at_sender ? 0 : 1];
  small.send_arena = 64 * kb;
  small.receive_arena = 64 * kb;
  small.device_arena = 64 * kb;
  comm_world w{kind, d.options};
  w.at(0).send(rank_id{1}, make_message("x", {d.make(100 * kb, 1)}), {});
  REQUIRE(w.heard(1).wait_messages(1));
  auto got = w.heard(1).take_messages()[0].second.body.tensors[0];
  CHECK(d.holds(1, got, pattern(100 * kb, 1)));
  auto sender = when_placed(w.at(0), 1);
  CHECK(by_rule(sender.sent, comm_rule::no_space) == 1);
  CHECK(handled(sender, comm_stage::preprocessing) == (at_sender ? 1 : 0));
  CHECK(handled(w.at(1).status(), comm_stage::postprocessing) == 1);
}

TEST_CASE("what a rank sends to itself from a device is copied there, too",
          "[actors][comm][device][R37]") {
  ON_EVERY_FABRIC;
  ON_EVERY_WAY;
  two_devices d{x};
  comm_world w{kind, d.options};
  auto mine = d.make(70000, 1);
  w.at(0).send(rank_id{0}, make_message("x", {mine, make_tensor(10, 2)}),
               w.heard(0).on_sent());
  REQUIRE(w.heard(0).wait_messages(1));
  REQUIRE(w.heard(0).wait_sent(1));
  auto got = w.heard(0).take_messages()[0].second.body.tensors;
  CHECK(got[0].data != mine.data);
  CHECK(d.holds(0, got[0], pattern(70000, 1)));
  CHECK(same_bytes(got[1], pattern(10, 2)));
}

TEST_CASE("for a rank without such a device a tensor says where it belongs",
          "[actors][comm][device]") {
  ON_EVERY_FABRIC;
  two_devices d{host_path()};
  d.options[1].devices = nullptr;
  comm_world w{kind, d.options};
  w.at(0).send(rank_id{1}, make_message("x", {d.make(70000, 1), d.make(10, 2)}),
               {});
  REQUIRE(w.heard(1).wait_messages(1));
  auto got = w.heard(1).take_messages()[0].second.body.tensors;
  for (auto& t : got) {
    CHECK(t.device == device_ref{});
    CHECK(t.home == device_ref{simulated_device::type, 0});
  }
  CHECK(same_bytes(got[0], pattern(70000, 1)));
  CHECK(same_bytes(got[1], pattern(10, 2)));
  // It has none to send from, either.
  w.at(1).send(rank_id{0}, make_message("x", {d.make(70000, 1)}),
               w.heard(1).on_sent());
  REQUIRE(w.heard(1).wait_sent(1));
  REQUIRE(w.heard(1).send_failures().size() == 1);
  CHECK(w.heard(1).send_failures()[0].code == error_code::unsupported);
}
