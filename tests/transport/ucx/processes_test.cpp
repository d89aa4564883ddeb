// ctest: label=multiprocess

#include "tests/support/catch.hpp"

#include "tests/support/actors/payloads.hpp"
#include "tests/support/cpu_time.hpp"
#include "tests/support/runs/process_world.hpp"

#include <chrono>
#include <cstdlib>
#include <set>
#include <string>
#include <utility>
#include <vector>

using namespace smp;
using namespace smp::test;

namespace {

using world = process_world;

std::string variable(const char* name) {
  auto result = std::getenv(name);
  return result != nullptr ? result : "";
}

/// Size of the i-th message of an exchange of all with all.
uint64_t mixed_size(uint64_t i) {
  uint64_t sizes[] = {0, 100, 5000, 70000, 300000};
  return sizes[i % 5] + i;
}

constexpr uint64_t mixed_count = 40;

/// Sends to all others, then checks what came from them.
std::string all_to_all(fabric& f, inbox& heard, uint64_t size) {
  auto self = f.self().value;
  for (uint64_t i = 0; i < mixed_count; ++i)
    for (uint64_t to = 0; to < size; ++to)
      f.send(rank_id{to},
             make_message(std::to_string(i),
                          {make_tensor(mixed_size(i), 100 * self + to + i)}),
             heard.on_sent());
  if (!heard.wait_messages(mixed_count * size)
      || !heard.wait_sent(mixed_count * size))
    return "not all came";
  std::set<std::pair<uint64_t, std::string>> seen;
  for (auto& [from, x] : heard.take_messages()) {
    auto text = to_text(x.body.bytes);
    auto i = std::stoull(text);
    if (!same_bytes(x.body.tensors.at(0),
                    pattern(mixed_size(i), 100 * from.value + self + i)))
      return "wrong bytes in message " + text;
    seen.emplace(from.value, text);
  }
  return seen.size() == mixed_count * size ? "all came" : "some came twice";
}

/// A rank that answers each message with its contents.
struct echo : fabric_listener {
  void on_message(rank_id from, message x) override {
    rank->send(from, std::move(x));
  }

  void on_peer_lost(const failure&) override {
    // nop
  }

  fabric* rank = nullptr;
};

} // namespace

TEST_CASE("a rank in a process of its own", "[.child]") {
  if (!parent_process::exists())
    SKIP("only as a child of another test");
  parent_process parent;
  auto size = std::stoull(variable("SMP_TEST_SIZE"));
  auto role = variable("SMP_TEST_ROLE");
  inbox heard;
  echo echoing;
  ucx_fabric rank{rank_id{std::stoull(variable("SMP_TEST_RANK"))}, size,
                  cluster::options_for(variable("SMP_TEST_KIND"))};
  echoing.rank = &rank;
  parent.tell(rank.address());
  auto addresses = split_addresses(parent.hear());
  if (role == "echo")
    rank.start(addresses, echoing);
  else
    rank.start(addresses, heard);
  parent.tell("ready");
  if (role.starts_with("flood")) {
    // Keeps several messages under way until it is killed.
    auto tensor = make_tensor(std::stoull(variable("SMP_TEST_BYTES")), 1);
    for (size_t i = 0;; ++i) {
      if (role == "flood")
        rank.send(rank_id{0}, make_message("x", {tensor}), heard.on_sent());
      else
        rank.send_marked(rank_id{0}, make_message("x", {tensor}), {i + 1},
                         heard.on_sent());
      if (i > 20)
        REQUIRE(heard.wait_sent(i - 20));
    }
  }
  if (role == "parting") {
    for (int i = 0; i < 50; ++i)
      rank.send(rank_id{0}, make_message("x", {make_tensor(i * 1000, 1)}));
    rank.stop(std::chrono::seconds{10});
    return;
  }
  if (role == "all_to_all")
    parent.tell(all_to_all(rank, heard, size));
  for (std::string x; x != "quit";) {
    x = parent.hear();
    if (x == "transports")
      parent.tell(rank.transports_to(rank_id{0}));
  }
  rank.stop(std::chrono::seconds{10});
}

TEST_CASE("tensors of any size come back from another process",
          "[transport][ucx]") {
  auto kind = GENERATE(as<std::string>{}, "shm", "sysv", "tcp");
  CAPTURE(kind);
  world w{kind, 2, "echo"};
  std::vector<uint64_t> sizes{0,     1,       8192,     8257,
                              65536, 1 << 20, 33 << 20, 80 << 20};
  for (auto size : sizes)
    w.rank.send(rank_id{1},
                make_message(std::to_string(size), {make_tensor(size, size)}));
  REQUIRE(w.heard.wait_messages(sizes.size()));
  std::multiset<uint64_t> seen;
  for (auto& [from, x] : w.heard.take_messages()) {
    auto size = std::stoull(to_text(x.body.bytes));
    CHECK(same_bytes(x.body.tensors.at(0), pattern(size, size)));
    seen.insert(size);
  }
  CHECK(seen == std::multiset<uint64_t>(sizes.begin(), sizes.end()));
  w.finish();
}

TEST_CASE("many tensors come back from another process", "[transport][ucx]") {
  auto kind = GENERATE(as<std::string>{}, "shm", "tcp");
  CAPTURE(kind);
  world w{kind, 2, "echo"};
  std::vector<tensor_ref> tensors;
  for (uint64_t i = 0; i < 300; ++i)
    tensors.push_back(make_tensor(mixed_size(i), i));
  w.rank.send(rank_id{1}, make_message("many", tensors));
  REQUIRE(w.heard.wait_messages(1));
  auto got = w.heard.take_messages()[0].second.body.tensors;
  REQUIRE(got.size() == tensors.size());
  for (uint64_t i = 0; i < got.size(); ++i)
    REQUIRE(same_bytes(got[i], pattern(mixed_size(i), i)));
  w.finish();
}

TEST_CASE("four processes talk to all at once", "[transport][ucx]") {
  auto kind = GENERATE(as<std::string>{}, "shm", "sysv", "tcp");
  CAPTURE(kind);
  world w{kind, 4, "all_to_all"};
  CHECK(all_to_all(w.rank, w.heard, 4) == "all came");
  for (auto& x : w.others)
    CHECK(x->hear() == "all came");
  w.finish();
}

TEST_CASE("ranks of one machine talk through shared memory",
          "[transport][ucx]") {
  auto [kind, name] = GENERATE(
    table<std::string, std::string>({{"shm", "posix"}, {"sysv", "sysv"}}));
  CAPTURE(kind);
  world w{kind, 2, "echo"};
  auto here = w.rank.transports_to(rank_id{1});
  CHECK_THAT(here, Catch::Matchers::ContainsSubstring(name));
  CHECK_THAT(here, Catch::Matchers::ContainsSubstring("cma"));
  w.other().tell("transports");
  CHECK(w.other().hear() == here);
  w.finish();
}

TEST_CASE("the user's environment wins over the defaults", "[transport][ucx]") {
  // Both sides must agree, so this process is a bystander here.
  world w{"tcp",
          2,
          "echo",
          {{"UCX_TLS", "self,tcp"}, {"UCX_TCP_TX_SEG_SIZE", "64K"}}};
  w.other().tell("transports");
  CHECK(w.other().hear() == "tcp");
  w.finish();
}

TEST_CASE("two connected ranks that are silent cost next to nothing",
          "[transport][ucx]") {
  auto kind = GENERATE(as<std::string>{}, "shm", "tcp");
  CAPTURE(kind);
  world w{kind, 2, "echo"};
  w.greet();
  auto before = cpu_seconds();
  CHECK_FALSE(w.heard.wait_messages(2, std::chrono::seconds{2}));
  CHECK(cpu_seconds() - before < 0.02 * 2);
  CHECK(w.heard.losses().empty());
  w.finish();
}

TEST_CASE("a rank that says something and leaves at once is heard",
          "[transport][ucx]") {
  auto kind = GENERATE(as<std::string>{}, "shm", "tcp");
  CAPTURE(kind);
  for (int round = 0; round < 5; ++round) {
    world w{kind, 2, "parting"};
    CHECK(w.heard.wait_messages(50));
    CHECK(w.other().join() == 0);
    CHECK(w.heard.losses().empty());
  }
}

TEST_CASE("a rank that leaves in order is not a loss", "[transport][ucx]") {
  auto kind = GENERATE(as<std::string>{}, "shm", "sysv", "tcp");
  CAPTURE(kind);
  world w{kind, 2, "echo"};
  w.greet();
  w.other().tell("quit");
  CHECK(w.other().join() == 0);
  // Longer than the keepalive takes to notice an end.
  CHECK_FALSE(w.heard.wait_losses(1, std::chrono::milliseconds{1500}));
}
