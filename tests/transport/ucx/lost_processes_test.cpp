// ctest: label=multiprocess

#include "tests/support/catch.hpp"

#include "tests/support/actors/payloads.hpp"
#include "tests/support/best_of.hpp"
#include "tests/support/cpu_time.hpp"
#include "tests/support/runs/process_world.hpp"

#include <atomic>
#include <chrono>
#include <csignal>
#include <memory>
#include <string>
#include <utility>
#include <vector>

// What becomes of those who talk to a rank that was killed, or that hangs.

using namespace smp;
using namespace smp::test;
using namespace std::chrono_literals;

namespace {

using world = process_world;

using clock_type = std::chrono::steady_clock;
using std::chrono::milliseconds;

milliseconds since(clock_type::time_point x) {
  return std::chrono::ceil<milliseconds>(clock_type::now() - x);
}

milliseconds loss_of_receiver(const std::string& kind, uint64_t bytes) {
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
  auto begin = clock_type::now();
  REQUIRE(w.heard.wait_losses(1));
  auto took = since(begin);
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
  return took;
}

milliseconds loss_of_sender(const std::string& kind, const std::string& bytes) {
  world w{kind, 2, "flood", {{"SMP_TEST_BYTES", bytes}}};
  REQUIRE(w.heard.wait_messages(30));
  w.other().signal(SIGKILL);
  auto begin = clock_type::now();
  REQUIRE(w.heard.wait_losses(1));
  auto took = since(begin);
  CHECK(w.heard.losses()[0].code == error_code::rank_down);
  // What was told last is whole.
  auto last = w.heard.take_messages().back().second;
  CHECK(same_bytes(last.body.tensors.at(0), pattern(std::stoull(bytes), 1)));
  return took;
}

/// @returns how long it takes until all ends that is under way to a hung rank
milliseconds end_of_loss(const std::string& kind) {
  world w{kind, 2, "sink"};
  w.other().signal(SIGSTOP);
  auto small = make_tensor(100, 1);
  auto large = make_tensor(8 << 20, 1);
  for (int i = 0; i < 300; ++i) {
    w.rank.send(rank_id{1}, make_message("x", {small}), w.heard.on_sent());
    w.rank.send(rank_id{1}, make_message("x", {large}), w.heard.on_sent());
  }
  failure why{error_code::rank_down, rank_id{1}, {}, "no heartbeat"};
  auto begin = clock_type::now();
  w.rank.peer_lost(why);
  REQUIRE(w.heard.wait_sent(600));
  REQUIRE(w.heard.wait_losses(1));
  auto took = since(begin);
  CHECK(w.heard.losses() == std::vector<failure>{why});
  for (auto& x : w.heard.send_failures())
    CHECK(x == why);
  return took;
}

/// The same where it is lost after another one.
milliseconds end_of_second_loss(const std::string& kind) {
  world w{kind, 3, "sink"};
  for (uint64_t i : {1, 2})
    w.other(i).signal(SIGSTOP);
  for (int i = 0; i < 20; ++i)
    w.rank.send(rank_id{2}, make_message("x", {make_tensor(8 << 20, 1)}),
                w.heard.on_sent());
  auto begin = clock_type::now();
  failure why{error_code::rank_down, rank_id{1}, {}, "killed by signal 9"};
  w.rank.peer_lost(why);
  why.rank = rank_id{2};
  w.rank.peer_lost(why);
  REQUIRE(w.heard.wait_sent(20));
  auto took = since(begin);
  CHECK(w.heard.send_failures() == std::vector<failure>(20, why));
  return took;
}

} // namespace

TEST_CASE("a rank that is killed while it receives is lost in 2 seconds",
          "[transport][ucx]") {
  auto kind = GENERATE(as<std::string>{}, "shm", "sysv", "tcp");
  auto bytes = GENERATE(as<uint64_t>{}, 100, 8 << 20);
  CAPTURE(kind, bytes);
  auto took = best_of(4, milliseconds{2s},
                      [&] { return loss_of_receiver(kind, bytes); });
  CHECK(took < 2s);
}

TEST_CASE("a rank that is killed while it sends is lost in 2 seconds",
          "[transport][ucx]") {
  auto kind = GENERATE(as<std::string>{}, "shm", "sysv", "tcp");
  auto bytes = GENERATE(as<std::string>{}, "100", "33554432");
  CAPTURE(kind, bytes);
  auto took = best_of(4, milliseconds{2s},
                      [&] { return loss_of_sender(kind, bytes); });
  CHECK(took < 2s);
}

TEST_CASE("a loss that others report ends what is in flight to a hung rank",
          "[transport][ucx]") {
  auto kind = GENERATE(as<std::string>{}, "shm", "tcp");
  CAPTURE(kind);
  auto took = best_of(4, milliseconds{2s}, [&] { return end_of_loss(kind); });
  CHECK(took < 2s);
}

// It is told goodbye, as it may live, and takes none if it does not.
TEST_CASE("what is under way to a second lost rank ends soon as well",
          "[transport][ucx]") {
  auto kind = GENERATE(as<std::string>{}, "shm", "tcp");
  CAPTURE(kind);
  auto took = best_of(4, milliseconds{700ms},
                      [&] { return end_of_second_loss(kind); });
  CHECK(took < 700ms);
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
  auto kind = GENERATE(as<std::string>{}, "shm", "sysv", "tcp");
  CAPTURE(kind);
  world w{kind, 2, "echo"};
  w.greet();
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
  auto begin = clock_type::now();
  w.rank.stop(std::chrono::milliseconds{200});
  CHECK(since(begin) < 30s); // else it waits for ever
  CHECK(w.heard.sent() == 1000);
  CHECK(w.heard.send_failures().size() > 0);
  for (auto& x : w.heard.send_failures())
    CHECK(x.code == error_code::cancelled);
}
