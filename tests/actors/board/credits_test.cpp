// ctest: label=threads processors=2
#include "tests/support/catch.hpp"

#include "actors/board/rank_board.hpp"
#include "actors/comm/comm_fabric.hpp"
#include "actors/stalls/stalls.hpp"
#include "tests/support/actors/awaited_report.hpp"
#include "transport/exchange.hpp"
#include "transport/ucx/ucx_fabric.hpp"

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

// A rank that reads nothing exhausts the credits of the other, over UCX.

using namespace smp;
using namespace std::chrono_literals;

namespace {

struct ucx_rank : fabric_listener {
  explicit ucx_rank(uint64_t self)
    : board(std::make_shared<rank_board>(rank_id{self}, 2)),
      fabric(std::make_shared<ucx_fabric>(rank_id{self}, 2),
             std::make_shared<actor_host>(), board),
      exchange(fabric) {
    // nop
  }

  void on_message(rank_id from, message x) override {
    before_each();
    exchange.deliver(from, std::move(x));
  }

  void on_peer_lost(const failure&) override {
    // nop
  }

  watched_rank watch() {
    watched_rank result;
    result.look = [this] { return board->look(); };
    result.view = [this] {
      auto view = board->view();
      view.complete = true;
      for (auto& x : view.peers)
        x.queued = fabric.queued_to(x.peer);
      return view;
    };
    result.report = [this](const std::string& x) { on_report(x); };
    result.end = [](const failure&) {};
    return result;
  }

  std::shared_ptr<rank_board> board;
  comm_fabric fabric;
  smp::exchange exchange;
  std::function<void()> before_each = [] {};
  std::function<void(const std::string&)> on_report = [](const std::string&) {};
};

} // namespace

TEST_CASE("exhausted credits name the rank that does not read",
          "[actors][stalls]") {
  constexpr int flood = 20000; // more than all windows hold
  const std::string expected
    = "rank 0 waits for exchange \"answer\" from rank 1";
  const std::string cause
    = " messages of rank 0 wait until rank 1 takes earlier ones";
  test::awaited_report reported{{expected, cause}};
  ucx_rank sender{0};
  ucx_rank sleeper{1};
  std::vector<std::string> addresses{sender.fabric.address(),
                                     sleeper.fabric.address()};
  // Its progress thread stands still until somebody complains.
  sleeper.before_each = [&] { reported.wait(); };
  sender.on_report = [&](const std::string& x) { reported.hear(x); };
  sender.fabric.start(addresses, sender);
  sleeper.fabric.start(addresses, sleeper);
  {
    actor_host host;
    stall_search monitor{host, {0.5, false}, {sender.watch(), sleeper.watch()}};
    std::thread other{[&] {
      noting_waiter notes{*sleeper.board};
      scoped_waiter installed{notes};
      for (int i = 0; i < flood; ++i)
        sleeper.exchange.receive(rank_id{0}, "flood");
      sleeper.exchange.send(rank_id{0}, "answer", {});
    }};
    noting_waiter notes{*sender.board};
    scoped_waiter installed{notes};
    for (int i = 0; i < flood; ++i)
      sender.exchange.send(rank_id{1}, "flood",
                           {std::vector<std::byte>(1000), {}});
    sender.exchange.receive(rank_id{1}, "answer");
    other.join();
  }
  CHECK_THAT(reported.text(), Catch::Matchers::ContainsSubstring(expected));
  CHECK_THAT(reported.text(), Catch::Matchers::EndsWith(cause));
  CHECK(sender.fabric.queued_to(rank_id{1}) == 0);
  sender.fabric.stop(5s);
  sleeper.fabric.stop(5s);
}
