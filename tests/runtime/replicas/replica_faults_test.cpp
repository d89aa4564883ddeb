// ctest: seconds=15 label=multiprocess alone

#include "tests/support/catch.hpp"

#include "actors/board/rank_board.hpp"
#include "runtime/launch/error_exit.hpp"
#include "runtime/launch/launcher.hpp"
#include "runtime/offload/offload_store.hpp"
#include "runtime/replicas/gradient_buckets.hpp"
#include "runtime/step/model_state.hpp"
#include "tests/support/best_of.hpp"
#include "tests/support/runs/faulty_run.hpp"
#include "tests/support/runs/program.hpp"
#include "tests/support/torch/training_step.hpp"
#include "tests/support/torch/two_ranks.hpp"

#include <fmt/format.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>
#include <torch/utils.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <functional>
#include <string>
#include <thread>

#include <unistd.h>

// kill -9 of a replica in the middle of what the others need it for. It kills
// itself when it sees that the moment has come; one of the others is late, so
// that the moment does not pass.

using namespace smp;
using namespace smp::test;
using Catch::Matchers::ContainsSubstring;

namespace {

constexpr uint64_t replica_count = 3;
constexpr uint64_t victim_replica = 1; // dp_rank, on the last rank of its
constexpr uint64_t late_replica = 2;   // pipeline, as that of who is late

int64_t now_ms() {
  return std::chrono::duration_cast<std::chrono::milliseconds>(
           std::chrono::system_clock::now().time_since_epoch())
    .count();
}

uint64_t pipeline_wanted() {
  return std::stoul(variable("TEST_PP"));
}

/// The last rank of a replica's pipeline. Ranks that share modules are
/// neighbours, else those of a pipeline are.
uint64_t last_rank_of(uint64_t replica, uint64_t pipeline,
                      const std::string& what) {
  return what == "shared" ? (pipeline - 1) * replica_count + replica
                          : replica * pipeline + pipeline - 1;
}

// -- a rank -------------------------------------------------------------------

/// What this rank does in the step of the fault.
struct fault_plan {
  bool now = false; // this is the step
  std::string what;
  uint64_t replica = 0;
  distributed_model_base* model = nullptr;
};

fault_plan plan;

template <class F>
void await_until(F f) {
  auto end = std::chrono::steady_clock::now() + patience;
  while (!f()) {
    if (std::chrono::steady_clock::now() > end)
      throw std::runtime_error{"the moment did not come"};
    let_pass(std::chrono::milliseconds{1});
  }
}

/// The moment has come for this rank to play its part.
bool is_part_of(uint64_t replica) {
  return plan.now && plan.replica == replica
         && pp_rank() + 1 == pipeline_wanted();
}

[[noreturn]] void die(const std::string& moment) {
  note("moment", moment);
  note("died", std::to_string(now_ms()));
  ::raise(SIGKILL);
  std::abort();
}

void outlive_victim() {
  std::filesystem::path dir{variable("TEST_DIR")};
  auto file = fmt::format(
    "begin-{}", last_rank_of(victim_replica, pipeline_wanted(), plan.what));
  ended_within(std::stoi(content_of(dir / file)), patience);
}

/// Since the step began.
std::string begun_buckets() {
  auto counts = plan.model->state().buckets()->take_counts();
  return std::to_string(counts.begun_early);
}

/// Two products, of which backward computes the second one's gradient first:
/// 16 MB, and a bucket of its own.
struct products_impl : torch::nn::Module {
  Tensor forward(Tensor x) {
    auto h = x.mm(first);
    auto y = h.mm(second);
    if (plan.what.starts_with("bucket") && y.requires_grad()) {
      y.register_hook([](const Tensor&) {
        if (is_part_of(late_replica))
          outlive_victim();
      });
      h.register_hook([](const Tensor&) { begun(); });
    }
    return y;
  }

  /// The bucket has begun here.
  static void begun() {
    if (is_part_of(0))
      note("other", begun_buckets());
    if (!is_part_of(victim_replica))
      return;
    await_until([] { return is_told("other"); });
    die(begun_buckets());
  }

  Tensor first = register_parameter("first", torch::eye(2048));
  Tensor second = register_parameter("second", torch::eye(2048));
};
TORCH_MODULE_IMPL(products, products_impl);

struct products_net_impl : torch::nn::Module {
  products_net_impl() {
    partition_scope on_last{static_cast<uint32_t>(pipeline_wanted() - 1)};
    there = submodule<products>(std::make_shared<hooked<products_impl>>());
    register_module("there", there);
  }

  Tensor forward(Tensor x) {
    return there(x * here);
  }

  submodule<products> there = nullptr;
  Tensor here = register_parameter("here", torch::ones({1}));
};
TORCH_MODULE_IMPL(products_net, products_net_impl);

/// Looks whether 4 blocks before it have arguments in the file.
struct looker_impl : torch::nn::Module {
  Tensor forward(Tensor x) {
    if (is_part_of(victim_replica)) {
      auto& store = *session::current().internals().offload();
      await_until([&] { return store.status().bytes > 0; });
      die(std::to_string(store.status().bytes));
    }
    return x * 1;
  }
};
TORCH_MODULE_IMPL(looker, looker_impl);

/// Arguments of 2 MB, all on the last rank.
struct blocks_net_impl : torch::nn::Module {
  blocks_net_impl() {
    for (int i = 0; i < 4; ++i)
      body->push_back(torch::nn::Linear(512, 512));
    body->push_back(looker{});
    auto last = static_cast<uint32_t>(pipeline_wanted() - 1);
    for (size_t i = 0; i < body->size(); ++i)
      set_partition(*body->ptr(i), last);
    register_module("body", body);
  }

  Tensor forward(Tensor x) {
    return body->forward(x * here);
  }

  torch::nn::Sequential body;
  Tensor here = register_parameter("here", torch::ones({1}));
};
TORCH_MODULE_IMPL(blocks_net, blocks_net_impl);

/// Of one replica this takes until the victim is gone: in a pipeline backward,
/// else forward.
struct late_impl : torch::nn::Module {
  Tensor forward(Tensor x) {
    auto y = x * 1;
    if (pipeline_wanted() == 1)
      be_late();
    else if (y.requires_grad())
      y.register_hook([](const Tensor&) { be_late(); });
    return y;
  }

  static void be_late() {
    if (is_part_of(late_replica))
      outlive_victim();
  }
};
TORCH_MODULE_IMPL(late, late_impl);

/// A module that all replicas share, between two for which one is late.
struct shared_net_impl : torch::nn::Module {
  shared_net_impl() {
    partition_scope on_last{static_cast<uint32_t>(pipeline_wanted() - 1)};
    before = submodule<late>(std::make_shared<hooked<late_impl>>());
    there = submodule<torch::nn::Linear>(512 * replica_count, 512);
    behind = submodule<late>(std::make_shared<hooked<late_impl>>());
    register_module("before", before);
    register_module("there", there);
    register_module("behind", behind);
  }

  Tensor forward(Tensor x) {
    return behind(there(before(x * here)));
  }

  submodule<late> before = nullptr, behind = nullptr;
  submodule<torch::nn::Linear> there = nullptr;
  Tensor here = register_parameter("here", torch::ones({1}));
};
TORCH_MODULE_IMPL(shared_net, shared_net_impl);

/// Of one replica the update takes until the victim is gone.
class late_sgd : public torch::optim::SGD {
public:
  using SGD::SGD;

  Tensor step(LossClosure closure = nullptr) override {
    if (plan.what == "parameters" && is_part_of(late_replica))
      outlive_victim();
    return SGD::step(std::move(closure));
  }
};

/// What the victim waits for when its moment has come: others' updates, or
/// who is late for a collective of the module that all share.
std::string awaited_by_victim() {
  if (plan.what == "parameters")
    return "smp.updates";
  return fmt::format("not joined by rank {}",
                     last_rank_of(late_replica, pipeline_wanted(), plan.what));
}

/// Kills this process when it waits for that.
void watch(rank_board& board) {
  await_until([&] {
    for (auto& x : board.view().activities)
      if (x.waits_for.find(awaited_by_victim()) != std::string::npos)
        die(x.waits_for);
    return false;
  });
}

template <class Model>
void train(session& s, Model net, Tensor x) {
  distributed_model model{net};
  plan.model = &model;
  late_sgd inner{model->parameters(),
                 torch::optim::SGDOptions(1e-4).momentum(0.9)};
  distributed_optimizer optimizer{inner};
  auto train_step = training_step(model, mean_of);
  std::thread watcher;
  // The first step learns what gradients to expect.
  for (int i = 0; i < 6; ++i) {
    optimizer.zero_grad();
    plan.now = i == 3;
    if (auto* buckets = model.state().buckets())
      buckets->take_counts();
    if ((plan.what == "parameters" || plan.what == "shared")
        && is_part_of(victim_replica))
      watcher = std::thread{watch, std::ref(s.internals().board())};
    train_step(x);
    optimizer.step();
  }
}

session_config config_of_fault() {
  session_config x;
  x.pipeline_parallel_degree = pipeline_wanted();
  x.ddp = true;
  x.auto_partition = false;
  x.fast_mode = false; // buckets begin early in a pipeline, too
  x.bucket_cap_mb = 1;
  x.threads = 1;
  x.shard_optimizer_state = plan.what != "bucket" && plan.what != "shared";
  x.shard_gradients = plan.what == "bucket of parts";
  if (plan.what == "offload") {
    x.microbatches = 2;
    x.offload_activations = true;
    x.offload_dir = variable("TEST_DIR") + "/offloaded";
    x.activation_checkpointing.modules = {"body"};
    x.activation_loading_horizon = 1;
  }
  if (plan.what == "shared") {
    x.tensor_parallel_degree = replica_count;
    x.tensor_parallel_modules = {"there"};
  }
  return x;
}

} // namespace

TEST_CASE("replica of a run with a fault", "[.rank]") {
  auto rank = variable("SMP_RANK");
  note("begin-" + rank, std::to_string(::getpid()));
  plan.what = variable("TEST_WHAT");
  int code = 0;
  try {
    session s{config_of_fault()};
    plan.replica = dp_rank();
    if (plan.what == "offload")
      train(s, blocks_net{}, torch::ones({2048, 512}));
    else if (plan.what == "shared")
      train(s, shared_net{}, torch::ones({8, 512 * replica_count}));
    else
      train(s, products_net{}, torch::ones({8, 2048}));
  } catch (const error& e) {
    note("heard-" + rank, e.what());
    fmt::print(stderr, "test: {}\n", e.what());
    code = exit_code_of(e.code());
  }
  note("end-" + rank, std::to_string(code));
  std::_Exit(code);
}

TEST_CASE("launcher of replicas with a fault", "[.launcher]") {
  launch_options x;
  x.command = this_program("replica of a run with a fault");
  x.ranks = replica_count * pipeline_wanted();
  x.log_dir = variable("TEST_DIR") + "/logs";
  // Who is left has to end by himself.
  x.grace = std::chrono::seconds{240};
  std::_Exit(launch(x));
}

// -- the test -----------------------------------------------------------------

namespace {

/// A run whose victim dies in the middle of `what`, and which ends as it
/// should. @returns after how many milliseconds
int64_t lose_replica(const std::string& what, uint64_t pipeline) {
  auto victim = last_rank_of(victim_replica, pipeline, what);
  faulty_run run{"launcher of replicas with a fault",
                 replica_count * pipeline,
                 victim,
                 {{"TEST_WHAT", what}, {"TEST_PP", std::to_string(pipeline)}}};
  auto offloaded = run.folder() / "offloaded";
  std::filesystem::create_directory(offloaded);
  auto died = std::stoll(run.await("died"));
  auto of_victim = fmt::format("rank {}: ", victim);
  run.check_survivors(3, of_victim);
  run.check_end(3, of_victim + "killed by signal 9 (SIGKILL)");
  auto took = now_ms() - died;
  CHECK(std::filesystem::is_empty(offloaded));
  // It was in the middle: two of three had begun the bucket, rows of the third
  // were not there, arguments were in the file, or one of three was not in the
  // collective.
  auto moment = run.await("moment");
  if (what.starts_with("bucket")) {
    CHECK(moment == "1");
    CHECK(run.await("other") == "1");
  } else if (what == "parameters") {
    CHECK_THAT(moment, ContainsSubstring("smp.updates"));
  } else if (what == "shared") {
    CHECK_THAT(moment, ContainsSubstring(" of ranks "));
  } else {
    CHECK(std::stoll(moment) > 0);
  }
  return took;
}

} // namespace

TEST_CASE("a replica that is killed in the middle ends all others in 2 seconds",
          "[runtime][death][replicas]") {
  auto what = GENERATE(as<std::string>{}, "bucket", "bucket of parts",
                       "parameters", "offload", "shared");
  auto pipeline = GENERATE(1u, 2u);
  CAPTURE(what, pipeline);
  auto took = best_of<int64_t>(5, 2000,
                               [&] { return lose_replica(what, pipeline); });
  CHECK(took < 2000);
}
