// ctest: label=proof
#include "tests/support/catch.hpp"

#include "tests/support/torch/equality.hpp"

#include <fmt/format.h>

// R35 to R37 over the loopback fabric: N virtual ranks in this process. Other
// schedules and modes are those of mode_matrix_test.cpp.

using namespace smp;

namespace {

/// Trains with this schedule and compares with plain LibTorch.
void check_equality(uint64_t pp, const std::string& pipeline,
                    uint64_t microbatches, double dropout) {
  virtual_world_options world;
  world.config.pipeline_parallel_degree = pp;
  world.config.pipeline = pipeline;
  world.config.microbatches = microbatches;
  world.config.threads = 1;
  world.reorder = true;
  std::vector<test::step_numbers> steps;
  run_virtual_world(pp, world, [&](session& s) {
    auto mine = test::run_steps(s, microbatches, dropout);
    if (s.pp_rank() == 0)
      steps = std::move(mine);
  });
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
