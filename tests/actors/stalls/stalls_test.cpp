// ctest: label=threads
#include "tests/support/catch.hpp"

#include "actors/board/rank_board.hpp"
#include "actors/comm/comm_fabric.hpp"
#include "actors/host/node.hpp"
#include "actors/server/execution_token.hpp"
#include "actors/stalls/stalls.hpp"
#include "tests/support/actors/awaited_report.hpp"
#include "tests/support/actors/function_services.hpp"
#include "tests/support/actors/thread_executor.hpp"
#include "transport/exchange.hpp"
#include "transport/loopback/loopback_fabric.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

// Real actors, threads and a STALL MONITOR: what is injected is named.

using namespace smp;
using namespace std::chrono_literals;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::EndsWith;
using Catch::Matchers::StartsWith;

namespace {

using clock_type = std::chrono::steady_clock;

/// The ranks of one process, each with a thread of its user.
class world {
public:
  explicit world(thread_modules modules, stall_options options = {60, false},
                 uint64_t size = 2)
    : modules_(std::move(modules)), net_(size, {.seed = 3}) {
    std::vector<rank_id> pipeline;
    std::vector<std::string> addresses;
    for (uint64_t i = 0; i < size; ++i) {
      pipeline.push_back(rank_id{i});
      addresses.push_back(net_.at(rank_id{i}).address());
    }
    std::vector<watched_rank> watched;
    for (uint64_t i = 0; i < size; ++i) {
      auto& x = *ranks_.emplace_back(std::make_unique<rank>(
        std::shared_ptr<fabric>{std::shared_ptr<void>{}, &net_.at(rank_id{i})},
        size));
      x.board->name_modules(
        [](module_id m) { return "m" + std::to_string(m.value); });
      server_options y;
      y.self = rank_id{i};
      y.pipeline = pipeline;
      y.fabric = x.fabric.get();
      y.board = x.board;
      y.token = std::make_shared<execution_token>();
      x.services.executor = [this] {
        return std::make_shared<thread_executor>(modules_, inside_,
                                                 most_inside_);
      };
      y.services = &x.services;
      x.actors = std::make_unique<node>(host_, std::move(y));
      x.fabric->serve(x.actors->server());
      x.fabric->start(addresses, x);
      watched.push_back(watch(x));
    }
    monitor_ = std::make_unique<stall_search>(host_, options,
                                              std::move(watched));
  }

  ~world() {
    monitor_.reset();
    // First, as it delivers to the actors.
    for (auto& x : ranks_)
      x->fabric->stop(1s);
    for (auto& x : ranks_)
      x->actors.reset();
  }

  /// Runs `user` on a thread per rank. @returns the first error of each
  std::vector<failure> run(const std::function<void(world&, size_t)>& user) {
    std::vector<std::thread> threads;
    std::vector<failure> result(ranks_.size());
    for (size_t i = 0; i < ranks_.size(); ++i)
      threads.emplace_back([&, i] {
        noting_waiter notes{*ranks_[i]->board};
        scoped_waiter installed{notes};
        try {
          user(*this, i);
        } catch (const error& e) {
          result[i] = e.cause();
        }
      });
    for (auto& x : threads)
      x.join();
    return result;
  }

  /// One step.
  std::vector<failure> step(uint64_t microbatches = 1) {
    return run([=](world& w, size_t i) { w.step_of(i, microbatches); });
  }

  void step_of(size_t i, uint64_t microbatches = 1) {
    auto report = std::make_shared<awaited<step_report>>();
    ranks_[i]->actors->begin_step(
      {step_id{1}, microbatches},
      [report](step_report x) { report->set_value(std::move(x)); });
    auto x = awaited<step_report>::get(report,
                                       end_of_step(step_id{1}, rank_id{0}));
    if (x.error)
      throw error{x.error};
  }

  smp::exchange& exchange(size_t i) {
    return ranks_[i]->exchange;
  }

  loopback_network& net() {
    return net_;
  }

  /// What was reported on rank 0, so far.
  std::vector<std::string> reports() {
    std::lock_guard guard{mutex_};
    return reports_;
  }

  /// @returns the longest time that a rank was not looked at, so far.
  clock_type::duration longest_without_look() {
    std::lock_guard guard{mutex_};
    for (auto& x : ranks_)
      note_look(*x);
    return longest_without_look_;
  }

  /// Called on each report.
  std::function<void(const std::string&)> on_report = [](auto&) {};

private:
  struct rank : fabric_listener {
    rank(std::shared_ptr<smp::fabric> x, uint64_t size)
      : board(std::make_shared<rank_board>(x->self(), size)),
        fabric(std::make_unique<comm_fabric>(
          std::move(x), std::make_shared<actor_host>(), board)),
        exchange(*fabric) {
      // nop
    }

    void on_message(rank_id from, message x) override {
      exchange.deliver(from, std::move(x));
    }

    void on_peer_lost(const failure&) override {
      // nop
    }

    std::shared_ptr<rank_board> board;
    std::unique_ptr<comm_fabric> fabric;
    smp::exchange exchange;
    function_services services;
    std::unique_ptr<node> actors;
    clock_type::time_point looked_at = clock_type::now();
  };

  /// @pre `mutex_` is held
  void note_look(rank& x) {
    auto before = std::exchange(x.looked_at, clock_type::now());
    longest_without_look_ = std::max(longest_without_look_,
                                     x.looked_at - before);
  }

  watched_rank watch(rank& x) {
    watched_rank result;
    result.look = [this, &x] {
      {
        std::lock_guard guard{mutex_};
        note_look(x);
      }
      return x.board->look();
    };
    result.view = [&x] {
      auto view = x.board->view();
      view.refused = x.fabric->stats().messages_refused;
      x.actors->complete(view, 300ms);
      return view;
    };
    result.report = [this, &x](const std::string& text) {
      if (x.board->self() != rank_id{0})
        return;
      {
        std::lock_guard guard{mutex_};
        reports_.push_back(text);
      }
      on_report(text);
    };
    result.end = [this, &x](const failure& why) {
      for (size_t i = 0; i < ranks_.size(); ++i)
        x.exchange.fail(rank_id{i}, why);
      x.actors->rank_down(why);
    };
    return result;
  }

  thread_modules modules_;
  std::atomic<int> inside_ = 0;
  std::atomic<int> most_inside_ = 0;
  actor_host host_;
  loopback_network net_;
  std::vector<std::unique_ptr<rank>> ranks_;
  std::mutex mutex_;
  std::vector<std::string> reports_;
  clock_type::duration longest_without_look_{}; // guarded by mutex_
  std::unique_ptr<stall_search> monitor_;
};

/// The root calls module 1 of rank 1.
thread_modules calls_1(thread_body module_1) {
  thread_modules result;
  result[root_module] = [](thread_caller& x, const std::string&) {
    return x.call(1, 1, phase::forward, "a");
  };
  result[module_id{1}] = std::move(module_1);
  return result;
}

/// The same, but the root goes on, and waits for the answer as at its end.
thread_modules promises_1(thread_body module_1) {
  auto result = calls_1(std::move(module_1));
  result[root_module] = [](thread_caller& x, const std::string&) {
    auto y = x.promise_call(1, 1, phase::forward, "a");
    auto why = answer_of("m1", phase::forward, rank_id{1});
    why.asks = y.number;
    x.await(y.answer, why);
    return std::string{};
  };
  return result;
}

std::string echo(thread_caller&, const std::string& args) {
  return args;
}

/// A deadlock: ended at once on all ranks, with the same words.
std::string check_deadlock(const std::vector<failure>& xs) {
  for (auto& x : xs) {
    CHECK(x.code == error_code::stalled);
    CHECK(x.text == xs[0].text);
    CHECK_THAT(x.text, ContainsSubstring("nothing executes and nothing is in "
                                         "flight"));
  }
  return xs[0].text;
}

} // namespace

TEST_CASE("a lost response ends the step at once and is named",
          "[actors][stalls]") {
  auto promised = GENERATE(false, true);
  world w{promised ? promises_1(echo) : calls_1(echo)};
  w.net().set_filter([](rank_id, rank_id, const message& x) {
    return x.kind != message_kind::response;
  });
  auto begin = clock_type::now();
  auto text = check_deadlock(w.step());
  CHECK(clock_type::now() - begin < 30s); // half of the timeout of a stall
  CHECK_THAT(text, ContainsSubstring("rank 0 (the step body, microbatch 0, "
                                     "forward) waits for module m1, microbatch "
                                     "0, forward from rank 1"));
  CHECK_THAT(text, EndsWith("; rank 1 has nothing of it: 1 of 1 messages from "
                            "rank 1 to rank 0 did not arrive"));
}

TEST_CASE("a lost request is named", "[actors][stalls]") {
  auto promised = GENERATE(false, true);
  world w{promised ? promises_1(echo) : calls_1(echo)};
  w.net().set_filter([](rank_id, rank_id, const message& x) {
    return x.kind != message_kind::request;
  });
  auto text = check_deadlock(w.step());
  CHECK_THAT(text, ContainsSubstring("rank 0 (the step body, microbatch 0, "
                                     "forward) waits for module m1, microbatch "
                                     "0, forward from rank 1"));
  CHECK_THAT(text, EndsWith("; rank 1 has nothing of it: 1 of 1 messages from "
                            "rank 0 to rank 1 did not arrive"));
}

TEST_CASE("ranks that wait under different names are a cycle",
          "[actors][stalls]") {
  world w{calls_1(echo)};
  auto text = check_deadlock(w.run([](world& x, size_t i) {
    std::vector<rank_id> both{rank_id{0}, rank_id{1}};
    x.exchange(i).barrier(both, i == 0 ? "left" : "right");
  }));
  CHECK_THAT(text, ContainsSubstring("rank 0 waits for exchange \"barrier "
                                     "left\" from rank 1"));
  CHECK_THAT(text, ContainsSubstring("rank 1 waits for exchange \"barrier "
                                     "right\" from rank 0"));
}

TEST_CASE("a module that waits for its caller is a cycle", "[actors][stalls]") {
  auto never = std::make_shared<completion>();
  world w{calls_1([&](thread_caller& x, const std::string& args) {
    x.await(never, {"exchange \"barrier b\"", rank_id{0}});
    return args;
  })};
  auto text = check_deadlock(w.step());
  CHECK_THAT(text, ContainsSubstring("rank 1 (module m1, microbatch 0, forward)"
                                     " waits for exchange \"barrier b\" from "
                                     "rank 0"));
  CHECK_THAT(text, EndsWith("cycle: rank 0 -> rank 1 -> rank 0"));
}

TEST_CASE("a rank that never begins the step is named", "[actors][stalls]") {
  world w{calls_1(echo)};
  auto text = check_deadlock(w.run([](world& x, size_t i) {
    if (i == 0)
      x.step_of(0);
    else
      x.exchange(1).receive(rank_id{0}, "never");
  }));
  CHECK_THAT(text, ContainsSubstring("rank 1 has module m1, microbatch 0, "
                                     "forward in line, waits until this rank "
                                     "begins the step"));
}

TEST_CASE("a module that computes for long is reported, and the step goes on",
          "[actors][stalls]") {
  test::awaited_report expected{
    {"; rank 1 executes module m1, microbatch 0, forward for "}};
  world w{calls_1([&](thread_caller&, const std::string& args) {
            expected.wait();
            return args;
          }),
          {0.5, false}};
  w.on_report = [&](auto& x) { expected.hear(x); };
  for (auto& x : w.step())
    CHECK(x == failure{});
  CAPTURE(w.reports());
  CHECK(expected.came());
}

TEST_CASE("a wait for the token leads to the execution that has it",
          "[actors][stalls]") {
  test::awaited_report expected{
    {"microbatch 0, forward) waits for the execution token for ",
     "; rank 0 executes the step body, microbatch 1, forward for "}};
  std::atomic<int> microbatches = 0;
  auto modules = calls_1(echo);
  auto call = modules[root_module];
  modules[root_module] = [&, call](thread_caller& x, const std::string& args) {
    if (++microbatches == 2)
      expected.wait(); // the answer to the first one comes meanwhile
    return call(x, args);
  };
  world w{std::move(modules), {0.5, false}};
  w.on_report = [&](auto& x) { expected.hear(x); };
  for (auto& x : w.step(2))
    CHECK(x == failure{});
  CAPTURE(w.reports());
  CHECK(expected.came());
}

TEST_CASE("a rank that computes between steps is not a deadlock",
          "[actors][stalls]") {
  test::awaited_report expected{
    {"; rank 1 executes user code outside of a step for "}};
  world w{calls_1(echo), {0.5, false}};
  w.on_report = [&](auto& x) { expected.hear(x); };
  auto errors = w.run([&](world& x, size_t i) {
    std::vector<rank_id> both{rank_id{0}, rank_id{1}};
    if (i == 1)
      expected.wait();
    x.exchange(i).barrier(both, "all");
  });
  for (auto& x : errors)
    CHECK(x == failure{});
  CAPTURE(w.reports());
  CHECK(expected.came());
}

TEST_CASE("steps that go on are never stalled", "[actors][stalls]") {
  auto begin = clock_type::now();
  // Waits in the middle of a step, for what is always under way or executed.
  auto modules = calls_1([](thread_caller& x, const std::string& args) {
    return x.call(0, 2, phase::forward, args);
  });
  modules[module_id{2}] = echo;
  world w{std::move(modules), {0.1, false}};
  auto end = clock_type::now() + 1s;
  // Of two rounds, by rank: from what moved in the one to what does in the next
  // one takes no longer.
  std::array<clock_type::duration, 2> longest{};
  auto errors = w.run([&](world& x, size_t i) {
    std::vector<rank_id> both{rank_id{0}, rank_id{1}};
    auto before = begin;
    auto last = begin;
    for (bool more = true; more;) {
      auto mine = std::vector{clock_type::now() < end ? 1.0 : 0.0};
      more = x.exchange(i).all_reduce_sum(both, "more", mine)[0] == 2;
      auto now = clock_type::now();
      longest[i] = std::max(longest[i], now - std::exchange(before, last));
      last = now;
    }
  });
  for (auto& x : errors)
    CHECK(x == failure{});
  for (auto& x : w.step())
    CHECK(x == failure{});
  longest[0] = std::max(longest[0], clock_type::now() - end);
  // A false deadlock ended the run. But where a thread did not get its turn,
  // nothing moved indeed, or nobody looked in time.
  auto reports = w.reports();
  for (auto& x : reports)
    CHECK_THAT(x, StartsWith("nothing moved for "));
  auto delays = std::max(longest[0], longest[1]) + w.longest_without_look();
  CAPTURE(reports, delays);
  CHECK((reports.empty() || delays >= 100ms));
}
