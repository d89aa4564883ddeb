#include "tests/support/catch.hpp"

#include "tests/support/actors/payloads.hpp"
#include "tests/support/error_of.hpp"
#include "transport/bytes.hpp"
#include "transport/exchange.hpp"
#include "transport/exchange_label.hpp"
#include "transport/loopback/loopback_fabric.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

using namespace smp;
using namespace smp::test;

namespace {

/// N ranks with an exchange each, over a network that reorders.
struct world {
  explicit world(uint64_t size, loopback_options options = {})
    : network{size, options} {
    std::vector<std::string> addresses(size);
    for (uint64_t i = 0; i < size; ++i) {
      group.push_back(rank_id{i});
      ranks.push_back(std::make_unique<rank>(network.at(rank_id{i})));
    }
    for (uint64_t i = 0; i < size; ++i)
      network.at(rank_id{i}).start(addresses, *ranks[i]);
  }

  ~world() {
    for (auto id : group)
      network.at(id).stop(std::chrono::milliseconds{0});
  }

  struct rank : fabric_listener {
    explicit rank(fabric& x) : messages{x} {
      // nop
    }

    void on_message(rank_id from, message x) override {
      messages.deliver(from, std::move(x));
    }

    void on_peer_lost(const failure& x) override {
      messages.peer_lost(x);
    }

    exchange messages;
  };

  exchange& at(uint64_t x) {
    return ranks[x]->messages;
  }

  /// Runs `f(rank)` on one thread per rank, joins them and checks what they
  /// expected: Catch2's own assertions are not thread-safe.
  void on_all(std::function<void(uint64_t)> f) {
    std::vector<std::thread> threads;
    for (uint64_t i = 0; i < group.size(); ++i)
      threads.emplace_back([this, &f, i] {
        auto why = failure_of([&] { f(i); });
        expect(!why, why.describe());
      });
    for (auto& t : threads)
      t.join();
    CHECK(unexpected == std::vector<std::string>{});
  }

  void expect(bool x, const std::string& what) {
    std::lock_guard guard{mutex};
    if (!x)
      unexpected.push_back(what);
  }

  std::mutex mutex;
  std::vector<std::string> unexpected;
  loopback_network network;
  std::vector<rank_id> group;
  std::vector<std::unique_ptr<rank>> ranks;
};

payload text(const std::string& x) {
  return {to_bytes(x), {}};
}

message raw(std::vector<std::byte> x) {
  return {message_kind::exchange, {std::move(x), {}}};
}

/// The envelope of the first exchange "n" from rank to rank.
std::vector<std::byte> envelope() {
  return to_payload(exchange_label{0, "p:n"}).bytes;
}

/// The same, but it says that its tag is longer.
std::vector<std::byte> truncated_envelope() {
  auto result = envelope();
  result.pop_back();
  return result;
}

/// The same, but it says that its tag is longer than anything can be.
std::vector<std::byte> endless_envelope() {
  auto result = envelope();
  // The size of a string stands before it.
  auto tag = to_payload(std::string{"p:n"}).bytes;
  std::fill_n(result.end() - static_cast<ptrdiff_t>(tag.size()),
              sizeof(uint32_t), std::byte{0xff});
  return result;
}

/// Notes what its thread last waited for.
struct noting_waiter : waiter {
  void wait(const completion_ptr& x, const wait_reason& why) override {
    seen = why.subject;
    beneath.wait(x, why);
  }

  waiter& beneath = waiter::current();
  wait_subject seen;
  scoped_waiter scope{*this};
};

} // namespace

TEST_CASE("a receive meets the send of its name, in whatever order",
          "[transport][exchange]") {
  auto seed = GENERATE(range(1, 6));
  world w{2, {static_cast<uint64_t>(seed), true, true}};
  w.at(0).send(rank_id{1}, "b", text("beta"));
  w.at(0).send(rank_id{1}, "a", text("alpha"));
  w.at(0).send(rank_id{1}, "c", text("gamma"));
  w.network.run();
  CHECK(to_text(w.at(1).receive(rank_id{0}, "a").bytes) == "alpha");
  CHECK(to_text(w.at(1).receive(rank_id{0}, "b").bytes) == "beta");
  CHECK(to_text(w.at(1).receive(rank_id{0}, "c").bytes) == "gamma");
}

TEST_CASE("the n-th send of a name meets its n-th receive",
          "[transport][exchange]") {
  // Twenty messages of one name over a network that shuffles them.
  auto seed = GENERATE(range(1, 6));
  world w{2, {static_cast<uint64_t>(seed), true, true}};
  for (int i = 0; i < 20; ++i)
    w.at(0).send(rank_id{1}, "x", text(std::to_string(i)));
  w.network.run();
  for (int i = 0; i < 20; ++i)
    REQUIRE(to_text(w.at(1).receive(rank_id{0}, "x").bytes)
            == std::to_string(i));
}

TEST_CASE("a receive parks until the message comes, with its tensors",
          "[transport][exchange]") {
  world w{2};
  w.on_all([&w](uint64_t rank) {
    if (rank == 0) {
      payload x = text("go");
      x.tensors.push_back(make_tensor(5000, 3));
      auto before = w.at(0).receive(rank_id{1}, "ready");
      w.at(0).send(rank_id{1}, "value", std::move(x));
    } else {
      w.at(1).send(rank_id{0}, "ready", {});
      noting_waiter waits;
      auto x = w.at(1).receive(rank_id{0}, "value");
      w.expect(waits.seen.what == wait_subject::kind::exchange
                 && waits.seen.name == "value",
               "what it waits for");
      w.expect(to_text(x.bytes) == "go", "the text");
      w.expect(x.tensors.size() == 1
                 && same_bytes(x.tensors[0], pattern(5000, 3)),
               "the tensor");
    }
  });
}

TEST_CASE("a rank may exchange with itself", "[transport][exchange]") {
  world w{1};
  w.at(0).send(rank_id{0}, "me", text("hello"));
  CHECK(to_text(w.at(0).receive(rank_id{0}, "me").bytes) == "hello");
  w.at(0).barrier(w.group, "all");
  CHECK(w.at(0).all_reduce_sum(w.group, "n", {2.5})
        == std::vector<double>{2.5});
}

TEST_CASE("nobody leaves a barrier before all have come",
          "[transport][exchange]") {
  world w{4};
  std::atomic<int> came = 0;
  w.on_all([&](uint64_t rank) {
    for (int round = 1; round <= 25; ++round) {
      ++came;
      w.at(rank).barrier(w.group, "round");
      w.expect(came >= 4 * round, "all came before one left");
    }
  });
}

TEST_CASE("a sum has the same bits on every rank, added in group order",
          "[transport][exchange]") {
  // Values whose sum depends on the order of additions.
  auto values = [](uint64_t rank) {
    std::vector<double> xs{1e16, 1.0, -1e16, 3.0};
    return std::vector<double>{xs[rank], 0.1 * static_cast<double>(rank)};
  };
  std::vector<double> expected(2, 0.0);
  for (uint64_t i = 0; i < 4; ++i)
    for (size_t j = 0; j < 2; ++j)
      expected[j] += values(i)[j];
  world w{4};
  w.on_all([&](uint64_t rank) {
    auto sum = w.at(rank).all_reduce_sum(w.group, "n", values(rank));
    w.expect(std::memcmp(sum.data(), expected.data(), 2 * sizeof(double)) == 0,
             "the same bits on rank " + std::to_string(rank));
  });
}

TEST_CASE("ranks that sum different numbers of values are told who differs",
          "[transport][exchange]") {
  world w{2};
  w.on_all([&](uint64_t rank) {
    auto why = failure_of([&] {
      w.at(rank).all_reduce_sum(w.group, "norm",
                                std::vector<double>(rank + 1, 0.0));
    });
    w.expect(why.code == error_code::protocol, why.describe());
    w.expect(why.rank == rank_id{1 - rank}, "names the other rank");
  });
}

TEST_CASE("all values are gathered in group order", "[transport][exchange]") {
  world w{4};
  w.on_all([&](uint64_t rank) {
    payload mine = text("r" + std::to_string(rank));
    mine.tensors.push_back(make_tensor(100 * rank, rank));
    auto all = w.at(rank).all_gather(w.group, "x", mine);
    w.expect(all.size() == 4, "one value per rank");
    for (uint64_t i = 0; i < all.size(); ++i) {
      w.expect(to_text(all[i].bytes) == "r" + std::to_string(i),
               "the text of rank " + std::to_string(i));
      w.expect(same_bytes(all[i].tensors.at(0), pattern(100 * i, i)),
               "the tensor of rank " + std::to_string(i));
    }
  });
}

TEST_CASE("a broadcast gives the root's value to all",
          "[transport][exchange]") {
  world w{3};
  w.on_all([&](uint64_t rank) {
    auto x = w.at(rank).broadcast(w.group, "x", rank_id{1},
                                  rank == 1 ? text("truth") : text("rumour"));
    w.expect(to_text(x.bytes) == "truth",
             "the truth on rank " + std::to_string(rank));
  });
}

TEST_CASE("groups that share ranks may use one name in different orders",
          "[transport][exchange]") {
  world w{3};
  std::vector<rank_id> pair{rank_id{0}, rank_id{1}};
  w.on_all([&](uint64_t rank) {
    auto all = [&] {
      return w.at(rank).all_reduce_sum(w.group, "n", {1.0})[0];
    };
    auto two = [&] { return w.at(rank).all_reduce_sum(pair, "n", {10.0})[0]; };
    if (rank == 0) {
      // Rank 0 sends both before it waits for either, on two threads.
      std::thread other{[&] { w.expect(two() == 20.0, "sum of two"); }};
      w.expect(all() == 3.0, "sum of all");
      other.join();
    } else if (rank == 1) {
      w.expect(two() == 20.0, "sum of two");
      w.expect(all() == 3.0, "sum of all");
    } else {
      w.expect(all() == 3.0, "sum of all");
    }
  });
}

TEST_CASE("a collective of strangers or in disorder is refused",
          "[transport][exchange]") {
  world w{3};
  std::vector<rank_id> others{rank_id{1}, rank_id{2}};
  std::vector<rank_id> disorder{rank_id{1}, rank_id{0}};
  std::vector<rank_id> twice{rank_id{0}, rank_id{0}};
  for (auto& group : {others, disorder, twice})
    CHECK(failure_of([&] { w.at(0).barrier(group, "x"); }).code
          == error_code::internal);
}

TEST_CASE("a wait ends when the other rank dies, now and later",
          "[transport][exchange]") {
  world w{3};
  failure dead{error_code::rank_down, rank_id{2}, {}, "killed by signal 9"};
  w.at(2).send(rank_id{0}, "last words", text("bye"));
  CHECK(to_text(w.at(0).receive(rank_id{2}, "last words").bytes) == "bye");
  w.on_all([&](uint64_t rank) {
    if (rank == 2)
      w.network.kill(dead);
    else
      w.expect(failure_of([&] { w.at(rank).barrier(w.group, "x"); }) == dead,
               "the barrier fails on rank " + std::to_string(rank));
  });
  CHECK(failure_of([&] { w.at(0).receive(rank_id{2}, "y"); }) == dead);
  // The living still talk.
  w.at(0).send(rank_id{1}, "z", text("on"));
  CHECK(to_text(w.at(1).receive(rank_id{0}, "z").bytes) == "on");
}

TEST_CASE("a value that came before its sender died is still received",
          "[transport][exchange]") {
  world w{2, {1, true, true}};
  w.at(1).send(rank_id{0}, "will", text("all of it"));
  w.network.run();
  w.network.kill({error_code::rank_down, rank_id{1}, {}, "dead"});
  w.network.run();
  CHECK(to_text(w.at(0).receive(rank_id{1}, "will").bytes) == "all of it");
  CHECK(failure_of([&] { w.at(0).receive(rank_id{1}, "will"); }).code
        == error_code::rank_down);
}

TEST_CASE("an envelope that cannot be read fails the waits for its sender",
          "[transport][exchange]") {
  auto bad = GENERATE(std::vector<std::byte>{},
                      std::vector<std::byte>(11, std::byte{0}),
                      truncated_envelope(), endless_envelope());
  world w{2, {1, true, true}};
  w.at(0).deliver(rank_id{1}, raw(bad));
  auto why = failure_of([&] { w.at(0).receive(rank_id{1}, "n"); });
  CHECK(why.code == error_code::protocol);
  CHECK(why.rank == rank_id{1});
}

TEST_CASE("one number that comes twice fails the waits for its sender",
          "[transport][exchange]") {
  world w{2, {1, true, true}};
  auto twice = envelope();
  SECTION("before it was received") {
    w.at(0).deliver(rank_id{1}, raw(twice));
    w.at(0).deliver(rank_id{1}, raw(twice));
    CHECK_NOTHROW(w.at(0).receive(rank_id{1}, "n"));
  }
  SECTION("after it was received") {
    w.at(0).deliver(rank_id{1}, raw(twice));
    CHECK_NOTHROW(w.at(0).receive(rank_id{1}, "n"));
    w.at(0).deliver(rank_id{1}, raw(twice));
  }
  CHECK(failure_of([&] { w.at(0).receive(rank_id{1}, "n"); }).code
        == error_code::protocol);
}
