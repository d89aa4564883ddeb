// ctest: seconds=95 label=proof
#include "tests/support/catch.hpp"

#include "runtime/verify/verify.hpp"
#include "tests/support/torch/verify_jobs.hpp"

#include <string>

// Whole models that ranks share, in each grid and for both ways to share a
// layer (R35, R54).

using namespace smp;

namespace {

struct grid {
  uint64_t pipeline;
  uint64_t tensor;
  uint64_t replicas;
};

constexpr grid grids[] = {
  {1, 2, 1}, {2, 2, 1}, {1, 2, 2}, {1, 4, 1}, {2, 2, 2}};

void compare(test::verify_case x, const grid& g, const std::string& optimize) {
  auto& smp = x.config.smp;
  smp.ddp = true;
  smp.optimize = optimize;
  smp.tensor_parallel_degree = g.tensor;
  smp.tensor_parallel_modules = {"*"};
  x.config.ranks = g.pipeline * g.tensor * g.replicas;
  INFO(x.config.model.type << ' ' << x.name << " for " << optimize << ", "
                           << g.tensor << " share, " << g.replicas
                           << " replicas");
  auto summary = test::run_case(x, 5);
  CHECK_THAT(to_text(summary), Catch::Matchers::StartsWith("equal: 5 steps"));
  CHECK(summary.gradients.compared > 0);
}

} // namespace

TEST_CASE("A BERT and a RoBERTa that ranks share equal one process",
          "[runtime][verify][tensor_parallel][R54]") {
  for (auto* type : {"bert", "roberta"})
    for (std::string optimize : {"speed", "memory"})
      for (auto& g : grids) {
        auto x = test::gpt_case(g.pipeline, "interleaved", 2);
        x.config.model.type = type;
        x.config.model.heads = 4;
        x.config.model.dropout = 0.2;
        x.config.optimizer.clip_grad_norm = 0.1;
        compare(x, g, optimize);
      }
}

TEST_CASE("Experts that belong to ranks equal one process",
          "[runtime][verify][tensor_parallel][R54]") {
  for (auto& g : grids) {
    auto x = test::gpt_case(g.pipeline, "interleaved", 2);
    x.config.model.type = "moe";
    x.config.model.experts = 4;
    x.config.model.heads = 4;
    x.config.model.dropout = 0.2;
    compare(x, g, "speed");
  }
}

TEST_CASE("Exports of Hugging Face that ranks share equal one process",
          "[runtime][verify][tensor_parallel][R54]") {
  // 8 samples. Of those with 2 heads 4 ranks share linears, of the RoBERTa,
  // which has 4, whole layers. The ALBERT calls its one layer three times, of
  // which they share linears.
  for (auto* model : {"hf_albert", "hf_bert", "hf_gpt2", "hf_roberta"})
    for (std::string optimize : {"speed", "memory"})
      for (auto& g : grids)
        compare(test::script_case(model, g.pipeline, 2), g, optimize);
  // The code of later versions of transformers.
  for (auto* model : {"../transformers/gpt2_4_50", "../transformers/gpt2_5_24",
                      "../transformers/bert_5_24"})
    for (std::string optimize : {"speed", "memory"})
      compare(test::script_case(model, 2, 2), grid{2, 2, 1}, optimize);
  // Of these no layer is known as a whole: they share linears and tables.
  for (auto* model : {"hf_llama", "hf_t5"})
    for (auto& g : {grid{1, 4, 1}, grid{2, 2, 2}})
      compare(test::script_case(model, g.pipeline, 2), g, "speed");
}
