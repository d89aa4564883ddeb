// ctest: seconds=98 label=multiprocess alone

#include "tests/support/catch.hpp"

#include "runtime/collectives/tensor_collectives.hpp"
#include "runtime/launch/error_exit.hpp"
#include "runtime/launch/launcher.hpp"
#include "runtime/session/rank_runtime.hpp"
#include "tests/support/runs/faulty_run.hpp"
#include "tests/support/runs/program.hpp"
#include "tests/support/torch/two_ranks.hpp"
#include "transport/wait.hpp"

#include <fmt/format.h>
#include <torch/torch.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include <unistd.h>

// kill -9 and SIGSTOP of a rank while it does what the others wait for. This
// program starts itself as a launcher, and that one as the ranks.

using namespace smp;
using namespace smp::test;
using namespace std::chrono_literals;
using Catch::Matchers::ContainsSubstring;

namespace {

constexpr uint64_t world = 3;
constexpr uint64_t victim = 1;

// -- a rank -------------------------------------------------------------------

/// 48 MB.
Tensor large() {
  return torch::ones({world, 4 << 20});
}

void wait_idly(session& s) {
  // The others wait in the barrier.
  while (s.rank() == victim && !is_told("go on"))
    let_pass(1ms);
  barrier();
}

/// 35 MB to rank 1 and back, in both phases.
std::function<void()> large_step() {
  auto remote = [](function_impl& m, Tensor x) { return x * m.weight; };
  auto local = [](caller_impl& m, Tensor x) { return m.there(x * m.here[0]); };
  auto model = std::make_shared<distributed_model<caller>>(seeded([&] {
    return caller{remote, local};
  }));
  auto train_step = step([model](Tensor x) {
    auto loss = (*model)(x).sum();
    model->backward(loss);
    return loss;
  });
  return [=, x = torch::ones({3 << 20, 3})]() mutable { train_step(x); };
}

struct shared_impl : torch::nn::Module {
  shared_impl() {
    register_module("up", up);
    register_module("down", down);
  }

  Tensor forward(Tensor x) {
    return down(torch::tanh(up(x)));
  }

  submodule<torch::nn::Linear> up{600, 600}, down{600, 600};
};
TORCH_MODULE_IMPL(shared, shared_impl);

/// 29 MB between any two, before and behind each of two modules, in both
/// phases.
std::function<void()> shared_step() {
  auto model = std::make_shared<distributed_model<shared>>(
    seeded([] { return shared{}; }));
  auto train_step = step([model](Tensor x) {
    auto loss = (*model)(x).sum();
    model->backward(loss);
    return loss;
  });
  return [=, x = torch::ones({12 << 10, 600})]() mutable { train_step(x); };
}

/// Waits until all ranks have joined. There the victim dies; who is left holds
/// the inside of his session, as a callback of the membership may.
class joining_waiter final : public waiter {
public:
  void wait(const completion_ptr& x, const wait_reason& why) override {
    beneath_.wait(x, why);
    if (session::current().rank() == victim)
      ::raise(SIGKILL);
    held_ = session::current().shared_internals();
  }

  /// Nothing to do if a session came to be.
  void check_ended() const {
    if (held_ && session::current_or_null() == nullptr)
      note("ended-" + std::to_string(held_->self().value),
           held_->watch().view().left ? "yes" : "no");
  }

private:
  waiter& beneath_ = waiter::current();
  std::shared_ptr<rank_runtime> held_;
};

std::function<void()> work(const std::string& what, session& s) {
  auto x = large();
  if (what == "idle")
    return [&s] { wait_idly(s); };
  if (what == "sent to")
    return [x] { broadcast(x, comm_group::world, 0); };
  if (what == "sends")
    return [x] { broadcast(x, comm_group::world, victim); };
  if (what == "allreduce")
    return [x] { allreduce(x); };
  if (what == "all_to_all")
    return [x] { all_to_all(x); };
  return what == "shared" ? shared_step() : large_step();
}

/// Works until the test says so to rank 0, or for ever.
void work_on(const std::string& what, session& s) {
  auto f = work(what, s);
  const uint64_t moment = what == "idle" ? 0 : 2;
  for (uint64_t i = 0;; ++i) {
    if (i == moment && s.rank() == victim)
      note("at it");
    f();
    auto over = torch::tensor(is_told("go on") ? 1 : 0);
    if (broadcast(over).item<int>() == 1)
      return;
  }
}

} // namespace

TEST_CASE("rank of a run with a fault", "[.rank]") {
  auto rank = variable("SMP_RANK");
  auto what = variable("TEST_WHAT");
  note("begin-" + rank, std::to_string(::getpid()));
  auto config = manual_world(world).config;
  if (what == "shared") {
    config.pipeline_parallel_degree = 1;
    config.tensor_parallel_degree = world;
    config.tensor_parallel_modules = {"*"};
    config.ddp = true;
  }
  if (variable("TEST_DEVICE") == "1")
    config.device_path = {.force = true,
                          .send_arena = 64,
                          .receive_arena = 64,
                          .ranks_per_node = 1};
  config.stall_timeout = std::stod(variable("TEST_STALL"));
  config.on_stall = "end";
  int code = 0;
  joining_waiter joining;
  std::optional<scoped_waiter> scope;
  if (what == "joined")
    scope.emplace(joining);
  try {
    session s{config};
    if (what != "handshake" && what != "shutdown")
      work_on(what, s);
    note("leaves-" + rank);
  } catch (const error& e) {
    note("heard-" + rank, e.what());
    fmt::print(stderr, "test: {}\n", e.what());
    code = exit_code_of(e.code());
  }
  joining.check_ended();
  note("end-" + rank, std::to_string(code));
  std::_Exit(code);
}

TEST_CASE("launcher of a run with a fault", "[.launcher]") {
  launch_options x;
  x.command = this_program("rank of a run with a fault");
  x.ranks = world;
  x.log_dir = variable("TEST_DIR") + "/logs";
  x.stalls = {std::stod(variable("TEST_STALL")), true};
  // Who is left has to end by himself.
  x.grace = 240s;
  std::_Exit(launch(x));
}

// -- the test -----------------------------------------------------------------

namespace {

/// What the others do to rank 1, or it to them.
faulty_run fault_in(const std::string& what, bool device = false,
                    double stall_timeout = 600) {
  return {"launcher of a run with a fault",
          world,
          victim,
          {{"TEST_WHAT", what},
           {"TEST_DEVICE", device ? "1" : "0"},
           {"TEST_STALL", std::to_string(stall_timeout)}}};
}

const std::string of_victim = fmt::format("rank {}: ", victim);

/// What the others do to rank 1, or it to them.
#define AT_EACH_MOMENT                                                         \
  auto what = GENERATE(as<std::string>{}, "idle", "sent to", "sends", "step",  \
                       "allreduce", "all_to_all", "shared");                   \
  CAPTURE(what)

} // namespace

TEST_CASE("a killed rank ends the others with its name, whatever they do",
          "[runtime][death]") {
  AT_EACH_MOMENT;
  auto device = GENERATE(false, true);
  CAPTURE(device);
  auto run = fault_in(what, device);
  run.await("at it");
  // Another moment of the transfer for each.
  std::mt19937 random{static_cast<unsigned>(what.size() * 2 + device)};
  let_pass(std::chrono::milliseconds{random() % 40});
  run.signal(victim, SIGKILL);
  run.check_survivors(3, of_victim);
  run.check_end(3, of_victim + "killed by signal 9 (SIGKILL)");
}

TEST_CASE("a stopped rank keeps nobody busy, and all go on with it",
          "[runtime][death]") {
  AT_EACH_MOMENT;
  auto device = what.size() % 2 == 1; // either for half of them
  CAPTURE(device);
  auto run = fault_in(what, device);
  run.await("at it");
  run.signal(victim, SIGSTOP);
  CHECK(run.comes_to_rest());
  SECTION("when it goes on") {
    run.signal(victim, SIGCONT);
    run.tell("go on");
    for (uint64_t i = 0; i < world; ++i)
      run.check_survivor(i, 0, "");
    run.check_end(0, "");
  }
  SECTION("until it is killed, in the middle of all") {
    run.signal(victim, SIGKILL);
    run.check_survivors(3, of_victim);
    run.check_end(3, of_victim + "killed by signal 9 (SIGKILL)");
  }
}

TEST_CASE("a stopped rank is a stall, whatever the others wait for",
          "[runtime][death][R7]") {
  auto what = GENERATE(as<std::string>{}, "sent to", "all_to_all", "step",
                       "shared");
  CAPTURE(what);
  auto device = what != "sent to";
  auto run = fault_in(what, device, 6); // no stall before the fault
  run.await("at it");
  run.signal(victim, SIGSTOP);
  run.check_survivors(4, "rank 1 has not answered");
  // The launcher would have more patience here.
  run.signal(victim, SIGKILL);
  run.check_end(4, "rank 1 has not answered");
}

TEST_CASE(
  "a rank that dies when all have joined ends sessions of which somebody "
  "holds the inside",
  "[runtime][death]") {
  auto run = fault_in("joined");
  run.check_survivors(3, of_victim);
  for (auto i : {0, 2})
    CHECK(run.await(fmt::format("ended-{}", i)) == "yes");
  run.check_end(3, of_victim + "killed by signal 9 (SIGKILL)");
}

TEST_CASE("a rank that dies while all join, or on its way out, keeps nobody",
          "[runtime][death]") {
  auto what = GENERATE(as<std::string>{}, "handshake", "shutdown");
  auto seed = GENERATE(range(1u, 7u));
  CAPTURE(what, seed);
  auto run = fault_in(what);
  std::mt19937 random{seed};
  if (what == "handshake") {
    run.await("begin-1");
    let_pass(std::chrono::milliseconds{random() % 300});
  } else {
    run.await("leaves-1");
    let_pass(std::chrono::milliseconds{random() % 20});
  }
  run.try_to_kill(victim);
  // Whether they still needed it or not, they end by themselves.
  auto first = run.await("end-0");
  auto last = run.await("end-2");
  CHECK((first == "0" || first == "3"));
  CHECK((last == "0" || last == "3"));
  auto code = run.end();
  // If it was faster, it had no fault.
  CHECK((code == 3 || (code == 0 && run.has("end-1"))));
}
