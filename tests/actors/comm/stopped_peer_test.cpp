// ctest: processors=2

#include "tests/support/catch.hpp"

#include "actors/comm/comm_fabric.hpp"
#include "tests/support/actors/inbox.hpp"
#include "tests/support/actors/payloads.hpp"
#include "tests/support/runs/process_memory.hpp"
#include "transport/ucx/ucx_fabric.hpp"

#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <vector>

// What a rank that takes nothing costs those who send to it
// (docs/internals/communication.md, "What waits, and how much").

using namespace smp;
using namespace smp::test;

namespace {

constexpr int64_t kb = 1024;

/// Over tcp this is not a rendezvous yet.
constexpr int64_t medium = 100 * kb;

/// Stops the thread that moves bytes at the first message, as SIGSTOP would,
/// until it is told to go on.
class stopping_inbox : public inbox {
public:
  void on_message(rank_id from, message x) override {
    if (to_text(x.body.bytes) == "stop") {
      stopped_.set_value();
      go_on_.get_future().wait();
      return;
    }
    for (auto& t : x.body.tensors)
      if (!same_bytes(t, t.nbytes == mb ? large_ : medium_))
        ++wrong_;
    x.body.tensors.clear();
    inbox::on_message(from, std::move(x));
  }

  int wrong() const {
    return wrong_;
  }

  void wait_until_stopped() {
    stopped_.get_future().wait();
  }

  void go_on() {
    go_on_.set_value();
  }

private:
  const std::vector<std::byte> large_ = pattern(mb, 1);
  const std::vector<std::byte> medium_ = pattern(medium, 1);
  std::atomic<int> wrong_ = 0;
  std::promise<void> stopped_;
  std::promise<void> go_on_;
};

struct pair_of_ranks {
  pair_of_ranks(const std::string& kind, const comm_options& options) {
    auto host = std::make_shared<actor_host>();
    ucx_options ucx;
    if (kind == "tcp")
      ucx.transports = "tcp,self";
    sender = std::make_unique<comm_fabric>(
      std::make_shared<ucx_fabric>(rank_id{0}, 2, ucx), host,
      std::make_shared<rank_board>(rank_id{0}, 2), options);
    other = std::make_unique<comm_fabric>(
      std::make_shared<ucx_fabric>(rank_id{1}, 2, ucx), host,
      std::make_shared<rank_board>(rank_id{1}, 2), options);
    std::vector<std::string> addresses{sender->address(), other->address()};
    sender->start(addresses, mine);
    other->start(addresses, stopped);
    sender->send(rank_id{1}, make_message("stop"), {});
    stopped.wait_until_stopped();
  }

  ~pair_of_ranks() {
    sender->stop(patience);
    other->stop(patience);
  }

  inbox mine;
  stopping_inbox stopped;
  std::unique_ptr<comm_fabric> sender;
  std::unique_ptr<comm_fabric> other;
};

/// Waits until none of the messages is on its way through the stages.
comm_report when_all_wait(comm_fabric& x, uint64_t messages) {
  auto deadline = std::chrono::steady_clock::now() + patience;
  for (;;) {
    auto result = x.status();
    uint64_t known = 0;
    for (auto& peer : result.peers)
      known += peer.open + peer.queued;
    if (known == messages || std::chrono::steady_clock::now() > deadline)
      return result;
    std::this_thread::yield();
  }
}

/// Waits until UCX has copied all that credits and sockets let it take. What it
/// copied has left, so nobody can tell beforehand how many of them stay.
comm_report when_none_leaves(pair_of_ranks& w) {
  constexpr int calm = 10;
  size_t turns = 0;
  for (int quiet = 0; quiet < calm;) {
    auto before = w.mine.sent();
    // It comes back in a turn of the thread that moves bytes.
    w.sender->send(rank_id{0}, make_message("turn"), {});
    REQUIRE(w.mine.wait_messages(++turns));
    quiet = w.mine.sent() == before ? quiet + 1 : 0;
  }
  return w.sender->status();
}

} // namespace

TEST_CASE("a stopped rank costs its senders a bounded memory",
          "[actors][comm][R47]") {
  auto kind = GENERATE(as<std::string>{}, "shm", "tcp");
  auto device = GENERATE(false, true);
  CAPTURE(kind, device);
  comm_options options;
  if (device)
    options = {true, 16 << 20, 16 << 20, 1};
  pair_of_ranks w{kind, options};
  constexpr int large = 500;
  constexpr int small = 2000;
  auto tensor = make_tensor(mb, 1);
  auto before = private_bytes();
  for (int i = 0; i < large; ++i)
    w.sender->send(rank_id{1}, make_message("x", {tensor}), w.mine.on_sent());
  for (int i = 0; i < small; ++i)
    w.sender->send(rank_id{1}, make_message("y"), w.mine.on_sent());
  auto now = when_all_wait(*w.sender, large);
  CHECK(now.peers.at(0).open <= 8);
  CHECK(now.peers.at(0).open_bytes <= 128 * mb);
  CHECK(now.send_arena.capacity == (device ? 16 * mb : 0));
  CHECK(w.sender->queued_to(rank_id{1}) > 0);
  auto grown = private_bytes() - before;
  INFO("private memory grew by " << grown << " bytes");
  // None of the 500 MB of tensors; 1 KB for each message, what UCX copied of
  // small ones, and what allocators take at once.
  CHECK(grown < (large + small) * 1024 + 64 * 8192 + 16 * mb);
  w.stopped.go_on();
  REQUIRE(w.stopped.wait_messages(large + small));
  REQUIRE(w.mine.wait_sent(large + small));
  CHECK(w.mine.send_failures().empty());
  CHECK(w.stopped.wrong() == 0);
}

TEST_CASE("what tcp copies for a stopped rank is bounded by credits",
          "[actors][comm][R47]") {
  pair_of_ranks w{"tcp", {}};
  constexpr int tensors = 2000;
  constexpr int envelopes = 500;
  auto tensor = make_tensor(medium, 1);
  auto before = private_bytes();
  for (int i = 0; i < tensors; ++i)
    w.sender->send(rank_id{1}, make_message("x", {tensor}), w.mine.on_sent());
  for (int i = 0; i < envelopes; ++i)
    w.sender->send(rank_id{1}, make_message(std::string(medium, 'y')),
                   w.mine.on_sent());
  auto now = when_none_leaves(w);
  CHECK(now.peers.at(0).open <= 8);
  CHECK(w.sender->queued_to(rank_id{1}) > 0);
  auto grown = private_bytes() - before;
  INFO("private memory grew by " << grown << " bytes");
#ifndef __SANITIZE_ADDRESS__ // which keeps what was freed, and more
  // Each envelope as it is and as it will be sent, 1 KB for each message, what
  // UCX copied of 64 messages, and what allocators take at once; none of the
  // 200 MB of tensors.
  CHECK(grown < 2 * envelopes * medium + (envelopes + tensors) * kb
                  + 64 * 256 * kb + 16 * mb);
#endif
  w.stopped.go_on();
  REQUIRE(w.stopped.wait_messages(envelopes + tensors));
  REQUIRE(w.mine.wait_sent(envelopes + tensors));
  CHECK(w.mine.send_failures().empty());
  CHECK(w.stopped.wrong() == 0);
}
