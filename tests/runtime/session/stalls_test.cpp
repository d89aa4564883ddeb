// ctest: seconds=63 label=multiprocess
#include "tests/support/catch.hpp"

#include "runtime/launch/launcher.hpp"
#include "runtime/session/rank_runtime.hpp"
#include "runtime/session/stalls.hpp"
#include "tests/support/actors/awaited_report.hpp"
#include "tests/support/best_of.hpp"
#include "tests/support/runs/program.hpp"
#include "tests/support/scratch_dir.hpp"
#include "tests/support/slowness.hpp"
#include "tests/support/stderr_to.hpp"
#include "tests/support/torch/training_step.hpp"
#include "tests/support/torch/two_ranks.hpp"
#include "transport/loopback/loopback_fabric.hpp"

#include <fmt/format.h>
#include <nlohmann/json.hpp>
#include <torch/nn/modules/linear.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <fcntl.h>
#include <unistd.h>

// A stall of a session is named, over threads and over processes.

using namespace smp;
using namespace smp::test;
using namespace std::chrono_literals;
using namespace std::string_literals;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::StartsWith;
using torch::Tensor;

namespace {

using clock_type = std::chrono::steady_clock;

/// What the ranks of a world heard and how they ended.
struct ending {
  std::vector<std::string> reports; // on rank 0
  std::vector<failure> errors;      // by rank
};

struct two_ranks {
  function_impl::code remote = [](function_impl& m, Tensor x) {
    return x * m.weight;
  };
  caller_impl::code local = [](caller_impl& m, Tensor x) {
    return m.there(x * m.here);
  };
  double timeout = 60;
  std::string on_stall = "report";
  std::function<void(const std::string&, bool)> heard = [](auto&, bool) {};
  std::function<bool(const message&)> arrives = [](auto&) { return true; };

  ending
  run(const std::function<void(session&, distributed_model<caller>&)>& user) {
    ending result;
    result.errors.resize(2);
    std::mutex mutex;
    auto world = manual_world(2);
    world.config.stall_timeout = timeout;
    world.config.on_stall = on_stall;
    auto body = [&](session& s) {
      if (s.rank() == 0)
        on_stall_of(s, mutex, result);
      try {
        distributed_model model{seeded([&] { return caller{remote, local}; })};
        user(s, model);
      } catch (const error& e) {
        std::lock_guard guard{mutex};
        result.errors[s.rank()] = e.cause();
      }
    };
    auto host = std::make_shared<actor_host>(); // outlives the network
    auto net = std::make_shared<loopback_network>(
      2, loopback_options{.seed = world.seed, .reorder = world.reorder});
    net->set_filter(
      [this](rank_id, rank_id, const message& x) { return arrives(x); });
    std::vector<std::shared_ptr<fabric>> fabrics;
    for (uint64_t i = 0; i < 2; ++i)
      fabrics.emplace_back(net, &net->at(rank_id{i}));
    run_virtual_world(fabrics, host, world.config, body);
    return result;
  }

  /// One step with one microbatch.
  ending step_once() {
    return run([](session&, distributed_model<caller>& model) {
      auto train_step = training_step(model, sum_of);
      train_step(torch::ones({2, 3}));
    });
  }

private:
  void on_stall_of(session& s, std::mutex& mutex, ending& result) {
    smp::on_stall(s, [&, f = heard](const std::string& text, bool ends) {
      {
        std::lock_guard guard{mutex};
        result.reports.push_back(text);
      }
      f(text, ends);
    });
  }
};

void check_fine(const ending& x) {
  for (auto& e : x.errors)
    CHECK(e.text == "");
}

void check_stalled(const ending& x, const std::string& text) {
  for (auto& e : x.errors) {
    CHECK(e.code == error_code::stalled);
    CHECK_THAT(e.text, ContainsSubstring(text));
  }
}

} // namespace

TEST_CASE("a module that takes long is named, and the step ends well",
          "[runtime][stalls]") {
  two_ranks x;
  x.timeout = 0.4;
  awaited_report reported{
    {"rank 0 (the step body, microbatch 0, forward) waits for module there, "
     "microbatch 0, forward from rank 1 for ",
     "; rank 1 executes module there, microbatch 0, forward for "}};
  x.heard = [&](const std::string& y, bool) { reported.hear(y); };
  x.remote = [&](function_impl& m, Tensor t) {
    reported.wait();
    return t * m.weight;
  };
  auto end = x.step_once();
  check_fine(end);
  CAPTURE(end.reports);
  CHECK(reported.came());
}

TEST_CASE("a module that loops for ever ends the run if asked for",
          "[runtime][stalls]") {
  // Long enough for the start of a step on a busy machine, and to answer.
  constexpr double timeout = 5;
  auto least = best_of<double>(3, timeout + 2, [] {
    two_ranks x;
    x.timeout = timeout;
    x.on_stall = "end";
    std::atomic<bool> released = false; // a thread cannot be killed
    x.heard = [&](const std::string&, bool ends) { released = ends; };
    x.remote = [&](function_impl& m, Tensor t) {
      while (!released)
        ; // for ever
      return t * m.weight;
    };
    auto end = x.step_once();
    check_stalled(end,
                  "; rank 1 executes module there, microbatch 0, forward "
                  "for ");
    const std::string before = "nothing moved for ";
    REQUIRE_THAT(end.errors[0].text, StartsWith(before));
    return std::stod(end.errors[0].text.substr(before.size()));
  });
  CHECK(least < timeout + 2);
}

TEST_CASE("a module that runs in place is named by its own name",
          "[runtime][stalls]") {
  two_ranks x;
  x.timeout = 0.4;
  awaited_report reported{
    {"; rank 0 executes module there, microbatch 0, forward for "}};
  x.heard = [&](const std::string& y, bool) { reported.hear(y); };
  x.remote = [&](function_impl& m, Tensor t) {
    reported.wait();
    return t * m.weight;
  };
  auto end = x.run([&](session& s, distributed_model<caller>& model) {
    model->there->smp_hook.pinned = 0; // with its caller
    auto train_step = step([&](Tensor t) { return model(t).sum(); });
    if (s.rank() == 0)
      train_step(torch::ones({2, 3}));
    else
      train_step(torch::ones({2, 3}));
  });
  check_fine(end);
  CAPTURE(end.reports);
  CHECK(reported.came());
}

TEST_CASE("a module that waits for a barrier of its caller is a cycle",
          "[runtime][stalls]") {
  two_ranks x;
  x.remote = [](function_impl& m, Tensor t) {
    pp_barrier();
    return t * m.weight;
  };
  x.local = [](caller_impl& m, Tensor t) {
    auto y = m.there(t * m.here);
    pp_barrier();
    return y;
  };
  auto end = x.step_once();
  check_stalled(end, "nothing executes and nothing is in flight");
  check_stalled(end,
                "rank 1 (module there, microbatch 0, forward) waits for "
                "barrier \"pp\" of ranks 0, 1 in there (not joined by rank 0) "
                "from rank 0");
  check_stalled(end, "cycle: rank 0 -> rank 1 -> rank 0");
}

TEST_CASE("what a call that nobody waits for lost is named",
          "[runtime][stalls][fast]") {
  auto lost = GENERATE(message_kind::request, message_kind::response);
  auto touched = GENERATE(false, true);
  CAPTURE(lost == message_kind::request, touched);
  two_ranks x;
  std::atomic<bool> loses = false;
  x.arrives = [&](const message& m) { return !loses || m.kind != lost; };
  x.local = [&](caller_impl& m, Tensor t) {
    auto y = t * m.here;
    auto z = m.there(y);
    return touched ? z + y : y;
  };
  auto end = x.run([&](session&, distributed_model<caller>& model) {
    auto train_step = training_step(model, sum_of);
    train_step(torch::ones({2, 3}));
    barrier();
    loses = true; // nobody waits for the second call of a kind
    train_step(torch::ones({2, 3}));
  });
  check_stalled(end,
                "rank 0 (the step body, microbatch 0, forward) waits for "
                "module there, microbatch 0, forward from rank 1 for ");
  check_stalled(end, "; rank 1 has nothing of it: 1 of ");
  check_stalled(end, lost == message_kind::request
                       ? " messages from rank 0 to rank 1 did not arrive"
                       : " messages from rank 1 to rank 0 did not arrive");
}

TEST_CASE("ranks that do not meet in the same collective are a cycle",
          "[runtime][stalls]") {
  two_ranks x;
  auto end = x.run([](session& s, distributed_model<caller>&) {
    if (s.rank() == 0)
      barrier();
    else
      allgather(1.0);
  });
  check_stalled(end,
                "rank 0 waits for barrier \"world\" of ranks 0, 1 (not joined "
                "by rank 1) from rank 1");
  check_stalled(end,
                "rank 1 waits for exchange \"smp.allgather.world\" from "
                "rank 0");
}

TEST_CASE("a rank that leaves out a step is told how many the others made",
          "[runtime][stalls]") {
  two_ranks x;
  auto end = x.run([](session& s, distributed_model<caller>& model) {
    auto train_step = training_step(model, sum_of);
    train_step(torch::ones({2, 3}));
    if (s.rank() == 0)
      train_step(torch::ones({2, 3}));
    clip_grad_norm_(model, 1.0);
  });
  check_stalled(end,
                "rank 0 is in step 2, but rank 1 made 1 and waits "
                "elsewhere: every rank has to call each step");
}

TEST_CASE("a rank that computes between steps lets the others wait",
          "[runtime][stalls]") {
  two_ranks x;
  x.timeout = 0.4;
  awaited_report reported{
    {"; rank 1 executes user code outside of a step for "}};
  x.heard = [&](const std::string& y, bool) { reported.hear(y); };
  auto end = x.run([&](session& s, distributed_model<caller>&) {
    if (s.rank() == 1)
      reported.wait();
    barrier();
  });
  check_fine(end);
  CAPTURE(end.reports);
  CHECK(reported.came());
}

// -- processes ----------------------------------------------------------------

namespace {

/// A busy machine keeps nobody waiting for so long before the fault.
constexpr stall_options ends_soon{6, true};

struct process_end {
  int code = 0;
  double seconds = 0;
  std::string told;
  std::string report; // of stall.json
};

/// @param stalls what the launcher is told; nothing: the ranks say `ends_soon`
process_end run_processes(const std::string& what,
                          std::optional<stall_options> stalls) {
  scratch_dir dir;
  launch_options x;
  x.command = this_program("rank of a stalled run");
  x.ranks = 2;
  x.log_dir = dir.path / "logs";
  x.environment["TEST_STALL"] = what;
  x.environment["TEST_PIDS"] = dir.path;
  x.stalls = stalls;
  x.environment["TEST_RANKS_SAY"] = stalls ? "no" : "yes";
  process_end result;
  slowness machine;
  auto begin = clock_type::now();
  {
    stderr_to file{dir.path / "stderr"};
    result.code = launch(x);
  }
  result.seconds = std::chrono::duration<double>(clock_type::now() - begin)
                     .count()
                   / machine.factor();
  result.told = dir.read("stderr");
  UNSCOPED_INFO(result.told);
  UNSCOPED_INFO(dir.read("logs/log-1.txt"));
  if (std::filesystem::exists(dir.path / "logs/stall.json"))
    result.report = nlohmann::json::parse(dir.read("logs/stall.json"))
                      .at("text");
  // Nobody is left, stopped ones neither.
  for (int rank = 0; rank < 2; ++rank) {
    auto pid = std::stoi(dir.read(fmt::format("pid-{}", rank)));
    CHECK(::kill(pid, 0) != 0);
  }
  return result;
}

/// Peers share a Linear, and one of them does not come to it or to its
/// gradient.
struct lonely_impl : torch::nn::Module {
  explicit lonely_impl(std::string what) : what(std::move(what)) {
    register_module("fc", fc);
  }

  Tensor forward(Tensor x) {
    if (what == "peer loops")
      stay_away(false);
    if (what == "peer stops")
      stay_away(true);
    auto y = fc(x);
    if (what == "peer loops in backward" && y.requires_grad())
      y.register_hook([](const Tensor&) { stay_away(false); });
    return y;
  }

  static void stay_away(bool stops) {
    while (tp_rank() == 1)
      if (stops)
        ::raise(SIGSTOP);
  }

  std::string what;
  submodule<torch::nn::Linear> fc{8, 8};
};
TORCH_MODULE_IMPL(lonely, lonely_impl);

session_config config_of_stall(const std::string& what) {
  auto result = manual_world().config;
  if (what.starts_with("peer")) {
    result.pipeline_parallel_degree = 1;
    result.tensor_parallel_degree = 2;
    result.tensor_parallel_modules = {"*"};
    result.ddp = true;
  }
  if (std::getenv("TEST_RANKS_SAY") == "yes"s) {
    result.stall_timeout = ends_soon.timeout;
    result.on_stall = ends_soon.end ? "end" : "report";
  }
  return result;
}

void share_a_step(const std::string& what) {
  distributed_model model{seeded([&] { return lonely{what}; })};
  auto train_step = training_step(model, sum_of);
  train_step(torch::ones({2, 8}));
}

} // namespace

TEST_CASE("rank of a stalled run", "[.rank]") {
  auto what = std::string{std::getenv("TEST_STALL")};
  auto config = config_of_stall(what);
  int code = 0;
  try {
    session s{config};
    std::ofstream{fmt::format("{}/pid-{}", std::getenv("TEST_PIDS"), s.rank())}
      << ::getpid();
    if (what.starts_with("peer"))
      share_a_step(what);
    auto remote = [&](function_impl& m, Tensor x) {
      if (what == "loop")
        for (;;)
          ;
      if (what == "stop 1")
        ::raise(SIGSTOP);
      return x * m.weight;
    };
    auto local = [](caller_impl& m, Tensor x) { return m.there(x * m.here); };
    distributed_model model{seeded([&] { return caller{remote, local}; })};
    auto train_step = training_step(model, sum_of);
    if (what == "stop 0" && s.rank() == 0)
      ::raise(SIGSTOP);
    if (what == "names")
      s.rank() == 0 ? barrier() : pp_barrier();
    train_step(torch::ones({2, 3}));
  } catch (const error& e) {
    fmt::print(stderr, "test: {}\n", e.what());
    code = e.code() == error_code::stalled ? 4 : 3;
  }
  std::_Exit(code);
}

TEST_CASE("a stopped process is named and ended, whichever it is",
          "[runtime][stalls]") {
  auto rank = GENERATE(0, 1);
  auto x = run_processes(fmt::format("stop {}", rank), ends_soon);
  CHECK(x.code == 4);
  CHECK_THAT(x.report, ContainsSubstring(
                         fmt::format("rank {} has not answered for ", rank)));
  CHECK_THAT(x.told, ContainsSubstring(x.report));
}

TEST_CASE("a process that loops for ever is named and ended",
          "[runtime][stalls]") {
  // `--ranks` of a program of one's own has a launcher that knows no session.
  auto told = GENERATE(true, false);
  CAPTURE(told);
  auto x = run_processes("loop",
                         told ? std::optional{ends_soon} : std::nullopt);
  CHECK(x.code == 4);
  CHECK_THAT(x.report, ContainsSubstring("; rank 1 executes module there, "
                                         "microbatch 0, forward for "));
  CHECK_THAT(x.told, ContainsSubstring(x.report));
}

TEST_CASE("a peer that does not come to a shared module is named and ended",
          "[runtime][stalls][tensor_parallel]") {
  auto what = GENERATE("peer loops"s, "peer loops in backward"s);
  CAPTURE(what);
  auto x = run_processes(what, ends_soon);
  CHECK(x.code == 4);
  auto backward = what.ends_with("backward");
  CHECK_THAT(x.report, ContainsSubstring("waits for all")
                         && ContainsSubstring(fmt::format(
                           "of ranks 0, 1{} (not joined by rank 1) from rank "
                           "1 for ",
                           backward ? "" : " in fc"))
                         && ContainsSubstring(fmt::format(
                           "; rank 1 executes the step body, microbatch 0, "
                           "{} for ",
                           backward ? "backward" : "forward")));
  CHECK_THAT(x.told, ContainsSubstring(x.report));
}

TEST_CASE("a peer that is stopped before a shared module is named and ended",
          "[runtime][stalls][tensor_parallel]") {
  auto x = run_processes("peer stops", ends_soon);
  CHECK(x.code == 4);
  CHECK_THAT(x.report, ContainsSubstring("waits for all")
                         && ContainsSubstring("rank 1 has not answered for "));
  CHECK_THAT(x.told, ContainsSubstring(x.report));
}

TEST_CASE("processes that wait for each other end at once",
          "[runtime][stalls]") {
  auto x = run_processes("names", stall_options{60, false});
  CHECK(x.code == 4);
  CHECK_THAT(x.report,
             ContainsSubstring("rank 0 waits for barrier \"world\" of ranks 0, "
                               "1 (not joined by rank 1) from rank 1"));
  CHECK_THAT(x.told, ContainsSubstring(x.report));
  CHECK(x.seconds < 15); // with the start of both
}
