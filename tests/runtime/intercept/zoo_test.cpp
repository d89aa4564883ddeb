// ctest: seconds=93 label=proof
#include "tests/support/catch.hpp"

#include "tests/support/runs/program.hpp"
#include "tests/support/torch/script_runs.hpp"

#include <fmt/format.h>

#include <filesystem>
#include <set>

// The models of tests/data/zoo, split over virtual ranks, against the same file
// run as it is (R35 to R37). `./dev zoo` does it over processes, against what
// Python expects.

using namespace smp;
using namespace smp::test;

namespace {

std::set<std::string>& names() {
  static std::set<std::string> result;
  return result;
}

/// Makes a test case of a model.
struct zoo_row {
  explicit zoo_row(const char* name) : name(name) {
    names().insert(name);
  }

  void run() const {
    auto job = zoo_job(name);
    job.steps = 2;
    for (uint64_t ranks : {1, 2, 4}) {
      for (uint64_t microbatches : {1, 4}) {
        for (auto pipeline : {"simple", "interleaved"}) {
          for (auto placement : {spread::scattered, spread::automatic}) {
            if (ranks == 1 && placement == spread::scattered)
              continue;
            job.ranks = ranks;
            job.microbatches = microbatches;
            job.pipeline = pipeline;
            job.placement = placement;
            INFO(fmt::format("{}: pp {}, {} microbatches, {}, {}", name, ranks,
                             microbatches, pipeline,
                             placement == spread::automatic ? "automatic"
                                                            : "scattered"));
            auto got = run_split(job);
            CHECK(differences(job, got) == std::vector<std::string>{});
            // Nothing would be shown by a model that stays in one place.
            if (ranks > 1 && placement == spread::scattered)
              CHECK(got.requests > 0);
          }
        }
      }
    }
    job.deferred = true;
    job.ranks = 3;
    job.placement = spread::scattered;
    INFO(name + ": each rank reads only what it owns");
    auto got = run_split(job);
    CHECK(got.deferred > 0);
    CHECK(differences(job, got) == std::vector<std::string>{});
  }

  std::string name;
};

} // namespace

#define SMP_ZOO_ROW(model)                                                     \
  static const zoo_row row_##model{#model};                                    \
  TEST_CASE("the zoo's " #model " has the numbers of one process",             \
            "[runtime][zoo]") {                                                \
    row_##model.run();                                                         \
  }

SMP_ZOO_ROW(arguments)
SMP_ZOO_ROW(bert)
SMP_ZOO_ROW(branch)
SMP_ZOO_ROW(changed_list)
SMP_ZOO_ROW(convnet)
SMP_ZOO_ROW(drop_path)
SMP_ZOO_ROW(dropout)
SMP_ZOO_ROW(early_exit)
SMP_ZOO_ROW(encoder_decoder)
SMP_ZOO_ROW(experts)
SMP_ZOO_ROW(frozen_trunk)
SMP_ZOO_ROW(gpt)
SMP_ZOO_ROW(hf_albert)
SMP_ZOO_ROW(hf_bert)
SMP_ZOO_ROW(hf_gpt2)
SMP_ZOO_ROW(hf_llama)
SMP_ZOO_ROW(hf_roberta)
SMP_ZOO_ROW(hf_t5)
SMP_ZOO_ROW(in_place)
SMP_ZOO_ROW(methods)
SMP_ZOO_ROW(mlp)
SMP_ZOO_ROW(packed)
SMP_ZOO_ROW(recurrent)
SMP_ZOO_ROW(reused)
SMP_ZOO_ROW(running_state)
SMP_ZOO_ROW(skip_link)
SMP_ZOO_ROW(t5)
SMP_ZOO_ROW(teacher)
SMP_ZOO_ROW(tied_lm)
SMP_ZOO_ROW(two_towers)
SMP_ZOO_ROW(unused_output)
SMP_ZOO_ROW(weight_as_argument)

TEST_CASE("every file of the zoo has a test", "[runtime][zoo]") {
  std::set<std::string> files;
  for (auto& file :
       std::filesystem::directory_iterator{source_file("tests/data/zoo")})
    if (file.path().extension() == ".pt")
      files.insert(file.path().stem());
  CHECK(files == names());
}
