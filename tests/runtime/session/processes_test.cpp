// ctest: seconds=18 label=multiprocess
#include "tests/support/catch.hpp"

#include "runtime/launch/environment.hpp"
#include "runtime/launch/launcher.hpp"
#include "tests/support/best_of.hpp"
#include "tests/support/runs/own_ranks.hpp"
#include "tests/support/scratch_dir.hpp"
#include "tests/support/torch/equality.hpp"
#include "tests/support/torch/training_step.hpp"

#include <fmt/format.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include <sys/wait.h>
#include <unistd.h>

// R35 to R37 over UCX: this program starts itself as the ranks of a run.

using namespace smp;

namespace {

constexpr double dropouts[] = {0.0, 0.2};
constexpr uint64_t microbatch_counts[] = {1, 3, 8};

std::string file_of(const std::string& dir, uint64_t m, double dropout) {
  return fmt::format("{}/{}-{}.safetensors", dir, m, dropout);
}

/// Compares what the ranks left in `dir` with plain LibTorch.
void check_files(const std::string& dir) {
  for (auto m : microbatch_counts)
    for (auto dropout : dropouts) {
      INFO("microbatches " << m << " dropout " << dropout);
      auto steps = test::load(file_of(dir, m, dropout));
      CHECK(test::differences(steps, 1, m, dropout)
            == std::vector<std::string>{});
    }
}

} // namespace

TEST_CASE("rank of an equality run", "[.rank]") {
  session_config config;
  config.pipeline_parallel_degree = std::stoul(std::getenv("TEST_PP"));
  config.pipeline = std::getenv("TEST_PIPELINE");
  config.threads = 1;
  session s{config};
  for (auto m : microbatch_counts)
    for (auto dropout : dropouts) {
      auto steps = test::run_steps(s, m, dropout);
      if (s.pp_rank() == 0)
        test::save(file_of(std::getenv("TEST_DIR"), m, dropout), steps);
    }
}

TEST_CASE("processes over UCX give the numbers of one process",
          "[runtime][equality]") {
  auto pp = GENERATE(2u, 4u);
  auto pipeline = GENERATE(as<std::string>{}, "simple", "interleaved", "1f1b");
  DYNAMIC_SECTION(fmt::format("pp {} {}", pp, pipeline)) {
    test::scratch_dir dir;
    test::require_case(
      dir, "rank of an equality run", pp,
      {{"TEST_PP", std::to_string(pp)}, {"TEST_PIPELINE", pipeline}});
    check_files(dir.path);
  }
}

TEST_CASE("ranks that mpirun starts find each other", "[runtime][mpirun]") {
  test::scratch_dir dir;
  auto command = fmt::format(
    "TEST_DIR={0} TEST_PP=2 TEST_PIPELINE=interleaved timeout 120 mpirun "
    "--allow-run-as-root --oversubscribe -n 2 {1} 'rank of an equality run' "
    "> {0}/log-0.txt 2>&1",
    dir.path.string(), test::this_program("").front());
  auto code = std::system(command.c_str());
  INFO(dir.read("log-0.txt"));
  REQUIRE(code == 0);
  check_files(dir.path);
}

// -- the end of a rank --------------------------------------------------------

namespace {

/// Kills its process when its turn comes, forward or backward.
struct killer_impl : torch::nn::Module {
  torch::Tensor forward(torch::Tensor x) {
    if (deadly)
      ::raise(SIGKILL);
    return x * weight;
  }
  torch::Tensor weight = register_parameter("weight", torch::ones({3}));
  bool deadly = false;
};
TORCH_MODULE_IMPL(killer, killer_impl);

struct killer_model_impl : torch::nn::Module {
  killer_model_impl() {
    partition_scope on_rank_1{1};
    there = submodule<killer>(std::make_shared<hooked<killer_impl>>());
    register_module("there", there);
  }
  torch::Tensor forward(torch::Tensor x) {
    return there(x);
  }
  submodule<killer> there = nullptr;
};
TORCH_MODULE_IMPL(killer_model, killer_model_impl);

int64_t now_ms() {
  return std::chrono::duration_cast<std::chrono::milliseconds>(
           std::chrono::system_clock::now().time_since_epoch())
    .count();
}

} // namespace

TEST_CASE("rank of a run that loses rank 1", "[.rank]") {
  session_config config;
  config.pipeline_parallel_degree = 3;
  config.microbatches = 4;
  config.auto_partition = false;
  session s{config};
  distributed_model model{killer_model{}};
  auto train_step = test::training_step(model, test::sum_of);
  train_step(torch::ones({4, 3}));
  auto dir = std::string{std::getenv("TEST_DIR")};
  std::ofstream{dir + "/pid-" + std::to_string(s.rank())} << ::getpid();
  if (s.rank() == 1) {
    model->there->deadly = true;
    std::ofstream{dir + "/died"} << now_ms();
  }
  try {
    train_step(torch::ones({4, 3}));
  } catch (const error& err) {
    std::ofstream{dir + "/heard-" + std::to_string(s.rank())} << err.what();
    std::_Exit(3);
  }
}

TEST_CASE("a killed rank ends the run everywhere within 2 seconds",
          "[runtime][death]") {
  auto took = test::best_of<int64_t>(5, 2000, [] {
    test::scratch_dir dir;
    auto command = fmt::format(
      "TEST_DIR={0} {1} 'launcher of a run that loses "
      "rank 1' > {0}/told.txt 2>&1",
      dir.path.string(), test::this_program("").front());
    auto status = std::system(command.c_str());
    auto ended = now_ms();
    auto told = dir.read("told.txt");
    INFO(told);
    CHECK(WEXITSTATUS(status) == 3);
    CHECK_THAT(told, Catch::Matchers::ContainsSubstring("rank 1"));
    CHECK_THAT(told, Catch::Matchers::ContainsSubstring("SIGKILL"));
    for (auto r : {0, 1, 2}) {
      auto pid = dir.read("pid-" + std::to_string(r));
      CHECK(!std::filesystem::exists("/proc/" + pid));
    }
    return ended - std::stoll(dir.read("died"));
  });
  CHECK(took < 2000);
}

TEST_CASE("launcher of a run that loses rank 1", "[.launcher]") {
  launch_options x;
  x.command = test::this_program("rank of a run that loses rank 1");
  x.ranks = 3;
  x.log_dir = std::getenv("TEST_DIR");
  std::_Exit(launch(x));
}
