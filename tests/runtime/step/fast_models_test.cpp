// ctest: seconds=53 label=proof
#include "tests/support/catch.hpp"

#include "tests/support/torch/equality.hpp"
#include "tests/support/torch/script_runs.hpp"

#include <fmt/format.h>

#include <optional>

// Whole models in fast mode, and replayed: the quickstart's GPT against plain
// LibTorch, and TorchScript files against themselves (R35 to R37).

using namespace smp;
using namespace smp::test;

TEST_CASE("the quickstart's model has the numbers of one process in fast mode",
          "[runtime][fast][equality]") {
  auto pp = GENERATE(2u, 4u);
  auto pipeline = GENERATE(as<std::string>{}, "simple", "interleaved", "1f1b",
                           "interleaved_1f1b");
  auto microbatches = GENERATE(1u, 3u, 8u);
  auto dropout = pipeline == "1f1b" ? 0.2 : 0.0;
  DYNAMIC_SECTION(
    fmt::format("pp {} {} microbatches {}", pp, pipeline, microbatches)) {
    virtual_world_options world;
    world.config.pipeline_parallel_degree = pp;
    world.config.pipeline = pipeline;
    world.config.microbatches = microbatches;
    world.config.threads = 1;
    world.config.fast_mode = true;
    if (pipeline == "interleaved_1f1b")
      world.config.chunks = 2;
    world.reorder = true;
    std::vector<step_numbers> steps;
    run_virtual_world(pp, world, [&](session& s) {
      auto mine = run_steps(s, microbatches, dropout);
      if (s.pp_rank() == 0)
        steps = std::move(mine);
    });
    CHECK(differences(steps, world.config.seed, microbatches, dropout)
          == std::vector<std::string>{});
  }
}

TEST_CASE("TorchScript models have the numbers of one process in fast mode",
          "[runtime][fast][script][zoo]") {
  auto name = GENERATE(
    as<std::string>{}, "arguments", "bert", "branch", "changed_list", "convnet",
    "drop_path", "dropout", "early_exit", "encoder_decoder", "experts",
    "frozen_trunk", "gpt", "hf_albert", "hf_bert", "hf_gpt2", "hf_llama",
    "hf_roberta", "hf_t5", "in_place", "methods", "mlp", "packed", "recurrent",
    "reused", "running_state", "skip_link", "t5", "teacher", "tied_lm",
    "two_towers", "unused_output", "weight_as_argument");
  // TorchScript optimises whole layers otherwise than single modules.
  auto placement = GENERATE(spread::scattered, spread::layers);
  auto pipeline = GENERATE(as<std::string>{}, "interleaved", "simple", "1f1b");
  if (pipeline != "interleaved" && name != "hf_llama")
    return; // what schedules change does not depend on the model
  DYNAMIC_SECTION(name << (placement == spread::layers ? ", by layer" : "")
                       << ", " << pipeline) {
    auto job = zoo_job(name);
    job.pipeline = pipeline;
    job.placement = placement;
    job.steps = 3;
    job.fast = true;
    job.ranks = 4;
    job.microbatches = 4;
    auto got = run_split(job);
    CHECK(differences(job, got) == std::vector<std::string>{});
    if (placement == spread::scattered)
      CHECK(got.requests > 0);
  }
}

TEST_CASE("TorchScript models are replayed with the numbers of one process",
          "[runtime][static][deterministic][script][zoo][R33]") {
  auto name = GENERATE(as<std::string>{}, "convnet", "drop_path", "dropout",
                       "hf_bert", "hf_llama", "hf_t5", "packed", "tied_lm",
                       "two_towers", "weight_as_argument");
  auto ranks = GENERATE(2u, 4u);
  auto placement = GENERATE(spread::scattered, spread::layers);
  auto fixed_order = GENERATE(true, false);
  auto pipeline = GENERATE(as<std::string>{}, "interleaved", "simple", "1f1b");
  if ((!fixed_order || pipeline != "interleaved") && name != "hf_llama")
    return; // the same messages, whatever the order
  DYNAMIC_SECTION(
    fmt::format("{}, pp {}, {}, {}, {}", name, ranks,
                placement == spread::layers ? "by layer" : "scattered",
                fixed_order ? "fixed order" : "free order", pipeline)) {
    auto job = zoo_job(name);
    job.placement = placement;
    job.replays = true;
    job.pipeline = pipeline;
    job.fixed_order = fixed_order;
    job.steps = 5;
    job.ranks = ranks;
    job.microbatches = 4;
    auto got = run_split(job);
    CHECK(differences(job, got) == std::vector<std::string>{});
    // In the first one the code is compiled, and the order of modules learnt.
    CHECK(got.replayed == 3);
  }
}

TEST_CASE(
  "TorchScript models are replayed with the numbers of one process by "
  "default",
  "[runtime][static][deterministic][fast][auto][script][zoo][R33]") {
  struct mode {
    bool replays;
    bool fixed_order;
    std::string pipeline;
  };
  auto name = GENERATE(as<std::string>{}, "hf_llama", "convnet", "hf_bert",
                       "hf_t5");
  auto ranks = GENERATE(2u, 4u);
  auto placement = GENERATE(spread::scattered, spread::layers);
  auto m = GENERATE(mode{true, false, "simple"}, mode{false, true, "1f1b"},
                    mode{true, true, "interleaved"});
  auto hardest = ranks == 4 && placement == spread::scattered && m.replays
                 && m.fixed_order;
  if (name != "hf_llama" && !hardest)
    return;
  DYNAMIC_SECTION(fmt::format(
    "{}, pp {}, {}, {}, {}{}", name, ranks,
    placement == spread::layers ? "by layer" : "scattered", m.pipeline,
    m.replays ? "static" : "dynamic", m.fixed_order ? ", fixed order" : "")) {
    auto job = zoo_job(name);
    job.placement = placement;
    job.fast = std::nullopt;
    job.replays = m.replays;
    job.fixed_order = m.fixed_order;
    job.pipeline = m.pipeline;
    job.steps = 6; // of which at most five learn (docs/modes.md)
    job.ranks = ranks;
    job.microbatches = 4;
    auto got = run_split(job);
    CHECK(differences(job, got) == std::vector<std::string>{});
    CHECK(got.replayed > 0);
    CHECK(got.ran_again == 0);
  }
}
