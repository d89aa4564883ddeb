// ctest: processors=2

#include "tests/support/catch.hpp"

#include "tests/support/actors/cluster.hpp"
#include "tests/support/actors/payloads.hpp"
#include "transport/loopback/loopback_fabric.hpp"
#include "transport/process_state.hpp"
#include "transport/ucx/ucx_fabric.hpp"
#include "transport/wake_up.hpp"

#include <array>
#include <atomic>
#include <chrono>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <unistd.h>

using namespace smp;
using namespace smp::test;

#define ON_EVERY_FABRIC                                                        \
  auto kind = GENERATE(as<std::string>{}, "loopback", "shm", "tcp", "spin");   \
  CAPTURE(kind)

namespace {

struct function_listener : fabric_listener {
  void on_message(rank_id from, message x) override {
    if (inside.exchange(true))
      overlapped = true;
    f(from, std::move(x));
    inside = false;
  }

  void on_peer_lost(const failure&) override {
    lost = true;
  }

  std::function<void(rank_id, message)> f;
  std::atomic<bool> inside = false;
  std::atomic<bool> overlapped = false;
  std::atomic<bool> lost = false;
};

/// Two ranks of this process; the second sends back what it gets.
struct echoing_pair {
  explicit echoing_pair(const std::string& kind) : network(2) {
    for (uint64_t i = 0; i < 2; ++i) {
      ranks[i] = &network.at(rank_id{i});
      if (kind != "loopback")
        ranks[i] = (owned[i] = std::make_unique<ucx_fabric>(
                      rank_id{i}, 2, cluster::options_for(kind)))
                     .get();
    }
    heard[1].f = [this](rank_id from, message x) {
      ranks[1]->send(from, std::move(x));
    };
  }

  void start() {
    std::vector<std::string> addresses{ranks[0]->address(),
                                       ranks[1]->address()};
    for (uint64_t i = 0; i < 2; ++i)
      ranks[i]->start(addresses, heard[i]);
  }

  ~echoing_pair() {
    for (auto x : ranks)
      x->stop(std::chrono::seconds{5});
  }

  loopback_network network;
  std::array<function_listener, 2> heard;
  std::array<std::unique_ptr<ucx_fabric>, 2> owned;
  std::array<fabric*, 2> ranks{};
};

} // namespace

TEST_CASE("threads that park get each answer, one message at a time",
          "[transport][park]") {
  ON_EVERY_FABRIC;
  constexpr size_t rounds = 300;
  std::array<pollable_wake_up, 3> answered;
  std::array<std::atomic<size_t>, 3> answers{};
  echoing_pair p{kind};
  p.heard[0].f = [&](rank_id, const message& x) {
    auto i = std::stoul(to_text(x.body.bytes));
    ++answers[i];
    answered[i].notify();
  };
  p.start();
  std::atomic<bool> in_turn = true;
  std::vector<std::thread> threads;
  for (size_t i = 0; i < answered.size(); ++i)
    threads.emplace_back([&, i] {
      for (size_t round = 1; round <= rounds; ++round) {
        // Small ones, a rendezvous, and several units.
        auto size = round % 50 == 0 ? 20 << 20 : round % 3 == 0 ? 100'000 : 100;
        p.ranks[0]->send(rank_id{1}, make_message(std::to_string(i),
                                                  {make_tensor(size, round)}));
        p.ranks[0]->park(answered[i]);
        if (answers[i] != round)
          in_turn = false;
      }
    });
  for (auto& x : threads)
    x.join();
  CHECK(in_turn);
  CHECK_FALSE(p.heard[0].overlapped);
  CHECK_FALSE(p.heard[0].lost);
}

namespace {

/// @returns whether all threads of this process but the caller's sleep
bool others_sleep() {
  for (auto& x : std::filesystem::directory_iterator{"/proc/self/task"}) {
    auto thread = std::stoi(x.path().filename());
    if (thread == ::gettid())
      continue;
    auto state = state_of_process(thread); // the kernel numbers both alike
    if (state && state->letter != 'S')
      return false;
  }
  return true;
}

} // namespace

TEST_CASE("while a thread is parked it delivers, and the fabric's does not",
          "[transport][park]") {
  auto kind = GENERATE(as<std::string>{}, "shm", "tcp");
  CAPTURE(kind);
  using clock = std::chrono::steady_clock;
  // The fabric's looks every now and then, in case that a wake-up was lost.
  // However busy the machine is, it finds one message per look at most.
  constexpr std::chrono::milliseconds between_looks{10};
  pollable_wake_up over;
  wake_up heard;
  std::atomic<int> by_parked = 0;
  std::atomic<int> by_fabric = 0;
  std::atomic<std::thread::id> parked_thread;
  echoing_pair p{kind};
  p.heard[0].f = [&](rank_id, const message&) {
    ++(std::this_thread::get_id() == parked_thread ? by_parked : by_fabric);
    heard.notify();
  };
  p.start();
  std::thread parked{[&] {
    parked_thread = std::this_thread::get_id();
    p.ranks[0]->park(over);
  }};
  auto deadline = clock::now() + patience;
  // From the other rank: who sends from this one may deliver as well. All have
  // to rest in between: what never rests is left to the fabric's thread.
  auto round = [&] {
    while (!others_sleep() && clock::now() < deadline)
      std::this_thread::yield();
    p.ranks[1]->send(rank_id{0}, make_message("x"));
    heard.wait();
  };
  // Until that thread has begun and parked, the fabric's delivers.
  while (by_parked == 0 && clock::now() < deadline)
    round();
  auto first = by_fabric.load();
  auto start = clock::now();
  for (int i = 0; i < 500; ++i)
    round();
  auto looks = (clock::now() - start) / between_looks + 1;
  over.notify();
  parked.join();
  CHECK(by_parked > 0);
  CHECK(by_fabric - first <= looks);
}

TEST_CASE("a thread that parks is woken while nothing arrives",
          "[transport][park]") {
  ON_EVERY_FABRIC;
  std::array<pollable_wake_up, 3> over;
  echoing_pair p{kind};
  p.start();
  std::vector<std::thread> threads;
  for (auto& x : over)
    threads.emplace_back([&] { p.ranks[0]->park(x); });
  for (auto& x : over)
    x.notify();
  for (auto& x : threads)
    x.join();
  // One notification, one return: the next is not there before it is sent.
  for (auto& x : over)
    CHECK_FALSE(x.try_wait());
}

TEST_CASE("after a stop no parked thread delivers", "[transport][park]") {
  ON_EVERY_FABRIC;
  for (int round = 0; round < 3; ++round) {
    pollable_wake_up over;
    std::atomic<bool> stopped = false;
    std::atomic<bool> late = false;
    std::atomic<int> answers = 0;
    wake_up some;
    {
      echoing_pair p{kind};
      p.heard[0].f = [&](rank_id from, message x) {
        if (stopped)
          late = true;
        if (++answers == 5)
          some.notify();
        p.ranks[0]->send(from, std::move(x));
        if (stopped)
          late = true;
      };
      p.start();
      std::thread parked{[&] { p.ranks[0]->park(over); }};
      for (int i = 0; i < 4; ++i)
        p.ranks[0]->send(rank_id{1}, make_message("x"));
      some.wait(); // they go on between the ranks
      p.ranks[0]->stop(std::chrono::seconds{0});
      stopped = true;
      over.notify();
      parked.join();
    }
    CHECK_FALSE(late);
  }
}
