#include "tests/support/catch.hpp"

#include "tests/support/scratch_dir.hpp"
#include "tests/support/torch/script_files.hpp"
#include "tests/support/torch/script_runs.hpp"

#include <fmt/format.h>

// Modules of TorchScript files that backward computes again (R52), against the
// same file run as it is.

using namespace smp;
using namespace smp::test;

namespace {

void check_model(const std::string& name, const std::string& modules,
                 const std::string& strategy = "each") {
  for (uint64_t ranks : {1, 2, 3})
    for (auto placement : {spread::scattered, spread::contiguous})
      for (auto fast : {false, true}) {
        // One of each.
        if (fast != (ranks == 3) || (placement == spread::contiguous && !fast))
          continue;
        auto job = zoo_job(name);
        job.ranks = ranks;
        job.microbatches = 2;
        job.placement = placement;
        job.fast = fast;
        job.recompute = {modules};
        job.strategy = strategy;
        INFO(fmt::format("{}: {}, {}, pp {}{}{}", name, modules, strategy,
                         ranks,
                         placement == spread::scattered ? ", scattered" : "",
                         fast ? ", fast" : ""));
        auto got = run_split(job);
        CHECK(differences(job, got) == std::vector<std::string>{});
      }
}

} // namespace

TEST_CASE("modules of a TorchScript file are computed again",
          "[runtime][script][R52]") {
  for (auto name : {"arguments", "dropout", "encoder_decoder", "reused",
                    "skip_link", "tied_lm", "two_towers", "weight_as_argument"})
    check_model(name, "*");
}

TEST_CASE("state of TorchScript modules changes once",
          "[runtime][script][R52]") {
  for (auto name : {"convnet", "teacher", "recurrent"})
    check_model(name, "*");
}

TEST_CASE("children of a TorchScript Sequential are computed again together",
          "[runtime][script][R52]") {
  for (auto strategy : {"each", "contiguous", "group_2"})
    check_model("convnet", "*", strategy);
}

TEST_CASE("code says which TorchScript modules are computed again",
          "[runtime][script][R52]") {
  scratch_dir dir;
  script_chain(4, 8, 4).save(dir.path / "model.pt");
  script_job job;
  job.path = dir.path / "model.pt";
  job.ranks = GENERATE(1u, 2u);
  job.microbatches = 2;
  job.marked = {"layer1", "layer3"};
  auto got = run_split(job);
  CHECK(got.recomputed == 2);
  CHECK(differences(job, got) == std::vector<std::string>{});
  job.marked.clear();
  CHECK(run_split(job).recomputed == 0);
}

TEST_CASE("a replayed step computes TorchScript again",
          "[runtime][script][R52]") {
  auto job = zoo_job("dropout");
  job.ranks = 2;
  job.microbatches = 4;
  job.steps = 5;
  job.recompute = {"*"};
  for (auto fast : {false, true}) {
    job.fast = fast;
    job.replays = true;
    job.fixed_order = false;
    auto got = run_split(job);
    CHECK(got.replayed > 0);
    CHECK(differences(job, got) == std::vector<std::string>{});
    job.replays = false;
    job.fixed_order = true;
    CHECK(differences(job, run_split(job)) == std::vector<std::string>{});
  }
}
