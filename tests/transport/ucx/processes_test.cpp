// ctest: timeout=120 label=multiprocess

#include "tests/support/catch.hpp"

#include "tests/support/child_process.hpp"
#include "tests/support/cluster.hpp"
#include "tests/support/cpu_time.hpp"
#include "tests/support/payloads.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

using namespace smp;
using namespace smp::test;

namespace {

constexpr const char* child_case = "a rank in a process of its own";

// -- addresses ----------------------------------------------------------------
// A packet holds all addresses: u32 size and bytes of each.

std::string join_addresses(const std::vector<std::string>& xs) {
  std::string result;
  for (auto& x : xs) {
    auto size = static_cast<uint32_t>(x.size());
    result.append(reinterpret_cast<const char*>(&size), sizeof size);
    result += x;
  }
  return result;
}

std::vector<std::string> split_addresses(const std::string& x) {
  std::vector<std::string> result;
  for (size_t i = 0; i < x.size();) {
    uint32_t size = 0;
    std::memcpy(&size, x.data() + i, sizeof size);
    result.push_back(x.substr(i + sizeof size, size));
    i += sizeof size + size;
  }
  return result;
}

// -- the world: rank 0 is this process, the others are children ---------------

struct world {
  world(const std::string& kind, uint64_t size, const std::string& role,
        const std::map<std::string, std::string>& more = {},
        tensor_places* places = nullptr)
    : rank{rank_id{0}, size, cluster::options_for(kind)} {
    if (places != nullptr)
      rank.place_with(*places);
    for (uint64_t i = 1; i < size; ++i) {
      auto environment = more;
      environment["SMP_TEST_RANK"] = std::to_string(i);
      environment["SMP_TEST_SIZE"] = std::to_string(size);
      environment["SMP_TEST_KIND"] = kind;
      environment["SMP_TEST_ROLE"] = role;
      others.push_back(
        std::make_unique<child_process>(child_case, environment));
    }
    std::vector<std::string> addresses{rank.address()};
    for (auto& x : others) {
      auto address = x->hear();
      REQUIRE(address);
      addresses.push_back(*address);
    }
    for (auto& x : others)
      x->tell(join_addresses(addresses));
    rank.start(addresses, heard);
    for (auto& x : others)
      REQUIRE(x->hear() == "ready");
  }

  ~world() {
    rank.stop(std::chrono::seconds{0});
  }

  child_process& other(uint64_t x = 1) {
    return *others[x - 1];
  }

  /// Ends all in order.
  void finish() {
    for (auto& x : others)
      x->tell("quit");
    rank.stop(std::chrono::seconds{10});
    for (auto& x : others)
      CHECK(x->join() == 0);
    CHECK(heard.losses().empty());
  }

  inbox heard;
  std::vector<std::unique_ptr<child_process>> others;
  ucx_fabric rank;
};

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
  auto kind = GENERATE(as<std::string>{}, "shm", "tcp");
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
  auto kind = GENERATE(as<std::string>{}, "shm", "tcp");
  CAPTURE(kind);
  world w{kind, 4, "all_to_all"};
  CHECK(all_to_all(w.rank, w.heard, 4) == "all came");
  for (auto& x : w.others)
    CHECK(x->hear() == "all came");
  w.finish();
}

TEST_CASE("ranks of one machine talk through shared memory",
          "[transport][ucx]") {
  world w{"shm", 2, "echo"};
  auto here = w.rank.transports_to(rank_id{1});
  CHECK_THAT(here, Catch::Matchers::ContainsSubstring("posix"));
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

TEST_CASE("a rank that is killed while it receives is lost in 2 seconds",
          "[transport][ucx]") {
  auto kind = GENERATE(as<std::string>{}, "shm", "tcp");
  auto bytes = GENERATE(as<uint64_t>{}, 100, 8 << 20);
  CAPTURE(kind, bytes);
  world w{kind, 2, "sink"};
  auto tensor = make_tensor(bytes, 1);
  size_t count = 0;
  auto send = [&] {
    w.rank.send(rank_id{1}, make_message("x", {tensor}), w.heard.on_sent());
    ++count;
  };
  for (int i = 0; i < 30; ++i)
    send();
  REQUIRE(w.heard.wait_sent(1));
  // Stopped first, so that some are certainly under way when it dies.
  w.other().signal(SIGSTOP);
  for (int i = 0; i < 300; ++i)
    send();
  w.other().signal(SIGKILL);
  REQUIRE(w.heard.wait_losses(1, std::chrono::seconds{2}));
  auto why = w.heard.losses()[0];
  CHECK(why.code == error_code::rank_down);
  CHECK(why.rank == rank_id{1});
  send();
  REQUIRE(w.heard.wait_sent(count));
  for (auto& x : w.heard.send_failures()) {
    CHECK(x.code == error_code::rank_down);
    CHECK(x.rank == rank_id{1});
  }
  CHECK(w.heard.send_failures().size() > 0);
  CHECK(w.heard.losses().size() == 1);
}

TEST_CASE("a rank that is killed while it sends is lost in 2 seconds",
          "[transport][ucx]") {
  auto kind = GENERATE(as<std::string>{}, "shm", "tcp");
  auto bytes = GENERATE(as<std::string>{}, "100", "33554432");
  CAPTURE(kind, bytes);
  world w{kind, 2, "flood", {{"SMP_TEST_BYTES", bytes}}};
  REQUIRE(w.heard.wait_messages(30));
  w.other().signal(SIGKILL);
  REQUIRE(w.heard.wait_losses(1, std::chrono::seconds{2}));
  CHECK(w.heard.losses()[0].code == error_code::rank_down);
  // What was told last is whole.
  auto last = w.heard.take_messages().back().second;
  CHECK(same_bytes(last.body.tensors.at(0), pattern(std::stoull(bytes), 1)));
}

TEST_CASE("a loss that others report ends what is in flight to a hung rank",
          "[transport][ucx]") {
  auto kind = GENERATE(as<std::string>{}, "shm", "tcp");
  CAPTURE(kind);
  world w{kind, 2, "sink"};
  w.other().signal(SIGSTOP);
  auto small = make_tensor(100, 1);
  auto large = make_tensor(8 << 20, 1);
  for (int i = 0; i < 300; ++i) {
    w.rank.send(rank_id{1}, make_message("x", {small}), w.heard.on_sent());
    w.rank.send(rank_id{1}, make_message("x", {large}), w.heard.on_sent());
  }
  failure why{error_code::rank_down, rank_id{1}, {}, "no heartbeat"};
  w.rank.peer_lost(why);
  REQUIRE(w.heard.wait_sent(600, std::chrono::seconds{2}));
  REQUIRE(w.heard.wait_losses(1, std::chrono::seconds{2}));
  CHECK(w.heard.losses() == std::vector<failure>{why});
  for (auto& x : w.heard.send_failures())
    CHECK(x == why);
}

namespace {

/// @returns how long it takes until all ends that is under way to a hung rank
/// which is lost after another one
std::chrono::milliseconds end_of_second_loss(const std::string& kind) {
  world w{kind, 3, "sink"};
  for (uint64_t i : {1, 2})
    w.other(i).signal(SIGSTOP);
  for (int i = 0; i < 20; ++i)
    w.rank.send(rank_id{2}, make_message("x", {make_tensor(8 << 20, 1)}),
                w.heard.on_sent());
  auto begin = std::chrono::steady_clock::now();
  failure why{error_code::rank_down, rank_id{1}, {}, "killed by signal 9"};
  w.rank.peer_lost(why);
  why.rank = rank_id{2};
  w.rank.peer_lost(why);
  REQUIRE(w.heard.wait_sent(20));
  auto took = std::chrono::steady_clock::now() - begin;
  CHECK(w.heard.send_failures() == std::vector<failure>(20, why));
  return std::chrono::ceil<std::chrono::milliseconds>(took);
}

} // namespace

// It is told goodbye, as it may live, and takes none if it does not.
TEST_CASE("what is under way to a second lost rank ends soon as well",
          "[transport][ucx]") {
  auto kind = GENERATE(as<std::string>{}, "shm", "tcp");
  CAPTURE(kind);
  // The machine may be busy: the best of a few counts.
  auto best = end_of_second_loss(kind);
  for (int i = 0; i < 3 && best >= std::chrono::milliseconds{700}; ++i)
    best = std::min(best, end_of_second_loss(kind));
  CHECK(best < std::chrono::milliseconds{700});
}

// UCX, the SUPERVISOR and the launcher may all tell, in any order.
TEST_CASE("the first news of a loss counts, whoever brings it",
          "[transport][ucx]") {
  auto kind = GENERATE(as<std::string>{}, "shm", "tcp");
  CAPTURE(kind);
  world w{kind, 2, "sink"};
  failure told{error_code::rank_down, rank_id{1}, {}, "killed by signal 9"};
  auto first = told;
  SECTION("the connection breaks after another one told") {
    w.other().signal(SIGSTOP);
    w.rank.send(rank_id{1}, make_message("x", {make_tensor(8 << 20, 1)}),
                w.heard.on_sent());
    w.rank.peer_lost(told);
    REQUIRE(w.heard.wait_losses(1));
    w.other().signal(SIGKILL);
  }
  SECTION("the connection breaks before another one tells") {
    w.other().signal(SIGKILL);
    w.rank.send(rank_id{1}, make_message("x", {make_tensor(8 << 20, 1)}),
                w.heard.on_sent());
    REQUIRE(w.heard.wait_losses(1));
    first = w.heard.losses()[0];
    w.rank.peer_lost(told);
    w.rank.peer_lost(told);
  }
  // Longer than the keepalive takes to notice an end.
  CHECK_FALSE(w.heard.wait_losses(2, std::chrono::milliseconds{1500}));
  CHECK(w.heard.losses() == std::vector<failure>{first});
  w.rank.send(rank_id{1}, make_message("late"), w.heard.on_sent());
  REQUIRE(w.heard.wait_sent(2));
  for (auto& x : w.heard.send_failures()) {
    INFO(x.describe());
    CHECK(x.code == error_code::rank_down);
    CHECK(x.rank == rank_id{1});
  }
  CHECK(w.heard.send_failures().back() == first);
}

namespace {

/// Deals out memory and counts what came back.
struct counted_memory : tensor_places {
  std::shared_ptr<std::byte> take(uint64_t size) {
    ++taken;
    return {new std::byte[size], [this](std::byte* x) {
              ++returned;
              delete[] x;
            }};
  }

  std::shared_ptr<std::byte> place(const arriving_tensor& x) override {
    return take(x.nbytes);
  }

  void placed(rank_id, uint64_t, bool) override {
    // nop
  }

  std::atomic<int> taken = 0;
  std::atomic<int> returned = 0;
};

} // namespace

// It may go on, and then read from or write to what was under way.
TEST_CASE("what a hung rank may still touch is not given out again",
          "[transport][ucx]") {
  auto kind = GENERATE(as<std::string>{}, "shm", "tcp");
  // The window is eight, and 4 MB where that is less, but for one.
  auto [bytes, window] = GENERATE(
    table<uint64_t, int>({{512 << 10, 8}, {1 << 20, 4}, {8 << 20, 1}}));
  CAPTURE(kind, bytes);
  counted_memory memory;
  {
    world w{kind, 2, "sink"};
    w.other().signal(SIGSTOP);
    for (int i = 0; i < 20; ++i) {
      tensor_ref x;
      x.owner = memory.take(bytes);
      x.data = x.owner.get();
      x.nbytes = bytes;
      x.shape = {static_cast<int64_t>(bytes)};
      w.rank.send(rank_id{1}, make_message("x", {x}), w.heard.on_sent());
    }
    w.rank.peer_lost({error_code::rank_down, rank_id{1}, {}, "no heartbeat"});
    REQUIRE(w.heard.wait_sent(20));
    // What never left waits for nobody. (UCX may read a part ahead.)
    auto kept = memory.taken - memory.returned;
    CHECK(kept > 0);
    CHECK(kept <= window);
  }
  CHECK(memory.taken == memory.returned);
}

TEST_CASE("where a hung rank may still write is not given out again",
          "[transport][ucx]") {
  counted_memory memory;
  {
    // In one chunk: it is under way for as long as it has a place.
    world w{
      "tcp", 2, "flood of places", {{"SMP_TEST_BYTES", "16777216"}}, &memory};
    int whole = 0;
    // Comes back in a turn of the thread that takes in what arrives.
    auto turn = [&] {
      w.rank.send(rank_id{0}, make_message("turn"));
      for (int back = 0; back == 0;) {
        REQUIRE(w.heard.wait_messages(1));
        for (auto& [from, x] : w.heard.take_messages())
          ++(from == rank_id{0} ? back : whole);
      }
    };
    int tries = 0;
    do {
      w.other().signal(SIGCONT);
      REQUIRE(w.heard.wait_messages(1));
      w.other().signal(SIGSTOP);
      // What is in sockets still arrives, and may be all of it.
      for (int quiet = 0; quiet < 10;) {
        auto before = std::pair{memory.taken.load(), whole};
        turn();
        quiet = before == std::pair{memory.taken.load(), whole} ? quiet + 1 : 0;
      }
      // It may have been stopped between two of them.
    } while (memory.taken == whole && ++tries < 100);
    REQUIRE(memory.taken > whole);
    w.rank.peer_lost({error_code::rank_down, rank_id{1}, {}, "no heartbeat"});
    REQUIRE(w.heard.wait_losses(1));
    turn();
    CHECK(memory.returned == whole);
  }
  CHECK(memory.taken == memory.returned);
}

TEST_CASE("a hung rank keeps nobody busy, and goes on when it wakes",
          "[transport][ucx]") {
  auto kind = GENERATE(as<std::string>{}, "shm", "tcp");
  CAPTURE(kind);
  world w{kind, 2, "echo"};
  w.rank.send(rank_id{1}, make_message("x"));
  REQUIRE(w.heard.wait_messages(1));
  w.other().signal(SIGSTOP);
  auto large = make_tensor(8 << 20, 1);
  for (int i = 0; i < 2000; ++i)
    w.rank.send(rank_id{1}, make_message("x"), w.heard.on_sent());
  for (int i = 0; i < 12; ++i)
    w.rank.send(rank_id{1}, make_message("x", {large}), w.heard.on_sent());
  auto before = cpu_seconds();
  constexpr std::chrono::milliseconds window{1500};
  CHECK_FALSE(w.heard.wait_sent(2012, window));
  CHECK(cpu_seconds() - before < 0.3 * 1.5);
  w.other().signal(SIGCONT);
  CHECK(w.heard.wait_messages(2013));
  CHECK(w.heard.losses().empty());
  w.finish();
}

TEST_CASE("a stop waits for a hung rank only for its limit",
          "[transport][ucx]") {
  auto kind = GENERATE(as<std::string>{}, "shm", "tcp");
  CAPTURE(kind);
  world w{kind, 2, "sink"};
  w.other().signal(SIGSTOP);
  auto large = make_tensor(8 << 20, 1);
  for (int i = 0; i < 500; ++i) {
    w.rank.send(rank_id{1}, make_message("x"), w.heard.on_sent());
    w.rank.send(rank_id{1}, make_message("x", {large}), w.heard.on_sent());
  }
  auto begin = std::chrono::steady_clock::now();
  w.rank.stop(std::chrono::milliseconds{200});
  CHECK(std::chrono::steady_clock::now() - begin < std::chrono::seconds{5});
  CHECK(w.heard.sent() == 1000);
  CHECK(w.heard.send_failures().size() > 0);
  for (auto& x : w.heard.send_failures())
    CHECK(x.code == error_code::cancelled);
}

TEST_CASE("two connected ranks that are silent cost next to nothing",
          "[transport][ucx]") {
  auto kind = GENERATE(as<std::string>{}, "shm", "tcp");
  CAPTURE(kind);
  world w{kind, 2, "echo"};
  w.rank.send(rank_id{1}, make_message("x"));
  REQUIRE(w.heard.wait_messages(1));
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

TEST_CASE("a rank that leaves in order is no loss", "[transport][ucx]") {
  auto kind = GENERATE(as<std::string>{}, "shm", "tcp");
  CAPTURE(kind);
  world w{kind, 2, "echo"};
  w.rank.send(rank_id{1}, make_message("x"));
  REQUIRE(w.heard.wait_messages(1));
  w.other().tell("quit");
  CHECK(w.other().join() == 0);
  // Longer than the keepalive takes to notice an end.
  CHECK_FALSE(w.heard.wait_losses(1, std::chrono::milliseconds{1500}));
}
