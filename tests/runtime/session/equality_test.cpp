// ctest: timeout=600 label=proof
#include "tests/support/catch.hpp"

#include "tests/support/torch_equality.hpp"

#include <fmt/format.h>

#include <atomic>

// R35 to R37 over the loopback fabric: N virtual ranks in this process.

using namespace smp;

namespace {

/// Odd microbatches first, then even ones; the youngest turns around first,
/// but half of them before the others start.
std::vector<task> unusual_list(uint64_t microbatches) {
  std::vector<task> result;
  for (uint64_t parity : {1, 0}) {
    std::vector<microbatch_id> started;
    for (auto x = parity; x < microbatches; x += 2)
      started.push_back(microbatch_id{x});
    for (auto x : started)
      result.push_back({x, phase::forward});
    for (auto x = started.rbegin(); x != started.rend(); ++x)
      result.push_back({*x, phase::backward});
  }
  return result;
}

/// How steps run (docs/static_mode.md); all give the same numbers.
void set_mode(session_config& x, const std::string& mode) {
  x.static_mode = mode.find("static") != mode.npos;
  x.static_steps = 2; // of 5
  x.fast_mode = mode.find("fast") != mode.npos;
}

/// Trains with this schedule and compares with plain LibTorch.
void check_equality(uint64_t pp, const std::string& pipeline,
                    uint64_t microbatches, double dropout,
                    const std::string& mode = "dynamic") {
  virtual_world_options world;
  world.config.pipeline_parallel_degree = pp;
  world.config.pipeline = pipeline;
  world.config.microbatches = microbatches;
  world.config.threads = 1;
  set_mode(world.config, mode);
  if (pipeline == "interleaved_1f1b")
    world.config.chunks = 2;
  if (pipeline == "list")
    world.config.schedule.list = unusual_list(microbatches);
  world.reorder = true;
  std::vector<test::step_numbers> steps;
  std::atomic<uint64_t> replayed = 0; // ranks, in the last step
  run_virtual_world(pp, world, [&](session& s) {
    auto mine = test::run_steps(s, microbatches, dropout);
    replayed += s.last_step().replayed;
    if (s.pp_rank() == 0)
      steps = std::move(mine);
  });
  CHECK(replayed == (world.config.static_mode ? pp : 0));
  CHECK(test::differences(steps, world.config.seed, microbatches, dropout)
        == std::vector<std::string>{});
}

} // namespace

TEST_CASE("pipelines give the numbers of one process", "[runtime][equality]") {
  auto pp = GENERATE(1u, 2u, 4u);
  auto pipeline = GENERATE(as<std::string>{}, "simple", "interleaved");
  auto microbatches = GENERATE(1u, 2u, 3u, 8u);
  auto dropout = GENERATE(0.0, 0.2);
  DYNAMIC_SECTION(fmt::format("pp {} {} microbatches {} dropout {}", pp,
                              pipeline, microbatches, dropout)) {
    check_equality(pp, pipeline, microbatches, dropout);
  }
}

TEST_CASE("every schedule gives the numbers of one process",
          "[runtime][equality][R32]") {
  auto pp = GENERATE(2u, 4u);
  auto pipeline = GENERATE(as<std::string>{}, "1f1b", "interleaved_1f1b",
                           "list");
  auto microbatches = GENERATE(1u, 2u, 3u, 8u);
  DYNAMIC_SECTION(
    fmt::format("pp {} {} microbatches {}", pp, pipeline, microbatches)) {
    check_equality(pp, pipeline, microbatches, 0.2);
  }
}

TEST_CASE("every schedule in every mode gives the numbers of one process",
          "[runtime][equality][R33]") {
  auto pp = GENERATE(2u, 4u);
  auto pipeline = GENERATE(as<std::string>{}, "simple", "interleaved", "1f1b",
                           "interleaved_1f1b");
  auto microbatches = GENERATE(1u, 2u, 3u, 8u);
  auto mode = GENERATE(as<std::string>{}, "static");
  DYNAMIC_SECTION(fmt::format("pp {} {} microbatches {} {}", pp, pipeline,
                              microbatches, mode)) {
    check_equality(pp, pipeline, microbatches, 0.2, mode);
  }
}

TEST_CASE("replayed steps with promises give the numbers of one process",
          "[runtime][equality][R33][R38]") {
  auto pipeline = GENERATE(as<std::string>{}, "simple", "interleaved", "1f1b",
                           "interleaved_1f1b");
  auto pp = GENERATE(2u, 4u);
  auto microbatches = GENERATE(1u, 2u, 3u, 8u);
  DYNAMIC_SECTION(
    fmt::format("pp {} {} microbatches {}", pp, pipeline, microbatches)) {
    check_equality(pp, pipeline, microbatches, 0.2, "static + fast");
  }
}
