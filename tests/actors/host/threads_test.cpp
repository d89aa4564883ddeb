// ctest: label=threads
#include "tests/support/catch.hpp"

#include "actors/host/node.hpp"
#include "actors/protocol/actor_scheduler.hpp"
#include "actors/protocol/server_handle.hpp"
#include "actors/server/execution_token.hpp"
#include "tests/support/actors/function_services.hpp"
#include "tests/support/actors/thread_executor.hpp"
#include "tests/support/error_of.hpp"
#include "transport/loopback/loopback_fabric.hpp"

#include <caf/send.hpp>

#include <functional>
#include <future>
#include <latch>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

using namespace smp;
using namespace smp::test;
using namespace std::chrono_literals;

namespace {

using texts = std::vector<std::string>;

/// Two virtual ranks of one process, as a session makes them.
class ranks {
public:
  explicit ranks(thread_modules modules, uint64_t size = 2)
    : modules_(std::move(modules)), net_(size, {.seed = 3}) {
    std::vector<rank_id> pipeline;
    std::vector<std::string> addresses;
    for (uint64_t i = 0; i < size; ++i) {
      pipeline.push_back(rank_id{i});
      addresses.push_back(net_.at(rank_id{i}).address());
    }
    for (uint64_t i = 0; i < size; ++i) {
      server_options x;
      x.self = rank_id{i};
      x.pipeline = pipeline;
      x.fabric = &net_.at(rank_id{i});
      x.token = token_;
      auto& entry = *entries_.emplace_back(std::make_unique<entry_type>());
      entry.services.executor = [this] {
        return std::make_shared<thread_executor>(modules_, inside_,
                                                 most_inside_);
      };
      entry.services.over = [this](step_id, microbatch_id) { ++over_; };
      x.services = &entry.services;
      entry.rank = std::make_unique<node>(host_, std::move(x));
      net_.at(rank_id{i}).start(addresses, entry);
    }
  }

  ~ranks() {
    for (size_t i = 0; i < entries_.size(); ++i)
      net_.at(rank_id{i}).stop(1s);
    entries_.clear();
  }

  std::future<step_report> begin(size_t rank, uint64_t step,
                                 uint64_t microbatches) {
    auto result = std::make_shared<std::promise<step_report>>();
    entries_[rank]->rank->begin_step(
      {step_id{step}, microbatches},
      [result](step_report x) { result->set_value(std::move(x)); });
    return result->get_future();
  }

  step_report run(uint64_t microbatches) {
    ++step_;
    std::vector<std::future<step_report>> futures;
    for (size_t i = 0; i < entries_.size(); ++i)
      futures.push_back(begin(i, step_, microbatches));
    auto result = wait(futures[0]);
    for (size_t i = 1; i < futures.size(); ++i)
      CHECK(wait(futures[i]).error == result.error);
    return result;
  }

  static step_report wait(std::future<step_report>& x) {
    if (x.wait_for(30s) != std::future_status::ready)
      throw std::runtime_error("the step does not end");
    return x.get();
  }

  node& at(size_t rank) {
    return *entries_[rank]->rank;
  }

  loopback_network& net() {
    return net_;
  }

  int most_inside() const {
    return most_inside_;
  }

  int over() const {
    return over_;
  }

private:
  struct entry_type : fabric_listener {
    void on_message(rank_id from, message x) override {
      run_here received;
      caf::anon_send(rank->server()->actor, from, std::move(x));
    }

    void on_peer_lost(const failure& x) override {
      rank->rank_down(x);
    }

    function_services services;
    std::unique_ptr<node> rank;
  };

  thread_modules modules_;
  std::atomic<int> inside_ = 0;
  std::atomic<int> most_inside_ = 0;
  std::atomic<int> over_ = 0;
  uint64_t step_ = 0;
  actor_host host_;
  loopback_network net_;
  std::shared_ptr<execution_token> token_ = std::make_shared<execution_token>();
  std::vector<std::unique_ptr<entry_type>> entries_;
};

/// Module 1 and 3 live on rank 1, 2 and the root on rank 0.
thread_modules make_modules(thread_body root) {
  thread_modules result;
  result[root_module] = std::move(root);
  result[module_id{1}] = [](thread_caller& x, const std::string& args) {
    return x.call(0, 2, phase::forward, args + "1");
  };
  result[module_id{2}] = [](thread_caller&, const std::string& args) {
    return args + "2";
  };
  result[module_id{3}] = [](thread_caller&, const std::string&) -> std::string {
    throw std::runtime_error("boom");
  };
  return result;
}

texts texts_of(const step_report& x) {
  texts result;
  for (auto& y : x.values)
    result.push_back(text_of(y));
  return result;
}

} // namespace

TEST_CASE("microbatches cross ranks on threads and come back",
          "[actors][threads][R25]") {
  ranks x{make_modules([](thread_caller& y, const std::string&) {
    auto z = y.call(1, 1, phase::forward, "a");
    y.await_grant();
    return z + y.call(1, 1, phase::backward, "b");
  })};
  for (int i = 0; i < 30; ++i)
    CHECK(texts_of(x.run(8)) == texts(8, "a12b12"));
  CHECK(x.most_inside() == 1); // one token for both ranks (R26)
  CHECK(x.over() == 30 * 8 * 2);
  auto st = x.at(0).status(5s);
  CHECK_FALSE(st.in_step);
  CHECK(st.pending == 0);
  CHECK(st.contexts.size() <= 4 * 2 + 1);
}

TEST_CASE("an exception on a thread ends the step on all ranks",
          "[actors][threads]") {
  ranks x{make_modules([](thread_caller& y, const std::string&) -> std::string {
    try {
      y.call(1, 3, phase::forward, {});
    } catch (...) {
      // user code may do this (R6)
    }
    return "fine?";
  })};
  for (int i = 0; i < 10; ++i)
    CHECK(x.run(3).error.text == "boom");
}

TEST_CASE("another thread may end a wait", "[actors][threads]") {
  auto done = std::make_shared<completion>();
  ranks x{make_modules([&](thread_caller& y, const std::string&) {
    y.await(done);
    return std::string{"done"};
  })};
  auto other = std::thread{[&] { done->set(); }};
  CHECK(texts_of(x.run(4)) == texts(4, "done"));
  other.join();
}

TEST_CASE("a killed rank ends a step that runs on threads",
          "[actors][threads]") {
  auto cause = failure{error_code::rank_down, rank_id{1}, {}, "killed"};
  std::latch reached{1};
  auto never = std::make_shared<completion>();
  auto modules = make_modules([](thread_caller& y, const std::string&) {
    return y.call(1, 4, phase::forward, {});
  });
  modules[module_id{4}] = [&](thread_caller& y, const std::string&) {
    reached.count_down();
    y.await(never);
    return std::string{};
  };
  ranks x{std::move(modules), 3};
  auto first = x.begin(0, 1, 1);
  auto second = x.begin(1, 1, 1);
  auto third = x.begin(2, 1, 1);
  reached.wait();
  x.net().kill(cause);
  CHECK(ranks::wait(first).error == cause);
  CHECK(ranks::wait(third).error == cause);
  // Rank 1 is cut off from all: it ends when it shuts down.
}

TEST_CASE("what a rank waited for may outlive its actor system",
          "[actors][threads]") {
  auto late = std::make_shared<completion>();
  std::latch reached{1};
  {
    ranks x{make_modules([&](thread_caller& y, const std::string&) {
      reached.count_down();
      y.await(late);
      return std::string{};
    })};
    x.begin(0, 1, 1);
    reached.wait();
  }
  late->set();
  CHECK(late->done());
}

TEST_CASE("a rank that shuts down unwinds its parked threads",
          "[actors][threads]") {
  std::future<step_report> report;
  std::atomic<int> unwound = 0;
  {
    std::latch reached{2};
    ranks x{make_modules([&](thread_caller& y, const std::string&) {
      struct guard {
        ~guard() {
          ++count;
        }
        std::atomic<int>& count;
      } g{unwound};
      reached.count_down();
      return y.call(1, 1, phase::forward, "a"); // rank 1 never enters
    })};
    report = x.begin(0, 1, 2);
    reached.wait();
    auto st = x.at(0).status(5s);
    CHECK(st.in_step);
    CHECK(st.microbatches_running == 2);
    CHECK(st.microbatches_left == 2);
    CHECK(st.contexts.size() == 2);
  }
  CHECK(ranks::wait(report).error.code == error_code::cancelled);
  CHECK(unwound == 2);
}

TEST_CASE("status names the actor that does not answer in time",
          "[actors][threads]") {
  std::promise<void> blocked;
  std::promise<void> release;
  actor_host host;
  loopback_network net{1, {}};
  server_options x;
  x.pipeline = {rank_id{0}};
  x.fabric = &net.at(rank_id{0});
  x.token = std::make_shared<execution_token>();
  function_services services;
  x.services = &services;
  services.schedule = [&](uint64_t n) {
    blocked.set_value(); // what no handler may do
    release.get_future().wait();
    return make_schedule("simple", n, n);
  };
  thread_modules modules;
  modules[root_module] = [](thread_caller&, const std::string&) {
    return std::string{};
  };
  std::atomic<int> inside = 0;
  std::atomic<int> most = 0;
  services.executor = [&] {
    return std::make_shared<thread_executor>(modules, inside, most);
  };
  node rank{host, std::move(x)};
  std::promise<void> over;
  rank.begin_step({step_id{1}, 1}, [&](step_report) { over.set_value(); });
  blocked.get_future().wait();
  CHECK_THROWS_WITH(rank.status(20ms),
                    Catch::Matchers::ContainsSubstring(
                      "no status from the MODULE SERVER of rank 0"));
  release.set_value();
  over.get_future().wait();
  CHECK(rank.status(5s).contexts.size() == 1);
}

namespace {

/// Tells that a message has arrived.
struct telling_listener : fabric_listener {
  void on_message(rank_id, message) override {
    arrived();
  }

  void on_peer_lost(const failure&) override {
    // nop
  }

  std::function<void()> arrived;
};

std::string text_of(std::promise<std::string>& x) {
  auto result = x.get_future();
  REQUIRE(result.wait_for(30s) == std::future_status::ready);
  return result.get();
}

} // namespace

TEST_CASE("no thread of the actors and of the fabric waits", "[actors][wait]") {
  // Where the end of a step is told, and where a message arrives.
  auto refused = [](std::promise<std::string>& to) {
    to.set_value(cause_of([] {
      waiter::current().wait(std::make_shared<completion>(), {"nothing", {}});
    }));
  };
  std::promise<std::string> from_actor;
  std::promise<std::string> from_fabric;
  {
    actor_host host;
    loopback_network net{1, {.seed = 3}};
    telling_listener listener;
    listener.arrived = [&] { refused(from_fabric); };
    auto& fabric = net.at(rank_id{0});
    server_options x;
    x.self = rank_id{0};
    x.pipeline = {rank_id{0}};
    x.fabric = &fabric;
    x.token = std::make_shared<execution_token>();
    std::atomic<int> inside = 0;
    std::atomic<int> most_inside = 0;
    thread_modules modules;
    modules[root_module] = [](thread_caller&, const std::string& args) {
      return args;
    };
    function_services services;
    x.services = &services;
    services.executor = [&] {
      return std::make_shared<thread_executor>(modules, inside, most_inside);
    };
    node rank{host, std::move(x)};
    fabric.start({fabric.address()}, listener);
    rank.begin_step({step_id{1}, 1},
                    [&](const step_report&) { refused(from_actor); });
    fabric.send(rank_id{0}, {message_kind::exchange, {}}, {});
    CHECK(text_of(from_actor)
          == "nothing is waited for on a thread of the actors, which must not "
             "wait: use it on a thread of your own");
    CHECK(text_of(from_fabric)
          == "nothing is waited for on the thread that delivers messages, "
             "which must not wait: use it on a thread of your own");
    fabric.stop(1s);
  }
}
