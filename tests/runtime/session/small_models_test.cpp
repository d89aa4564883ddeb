// ctest: seconds=20
#include "tests/support/catch.hpp"

#include "tests/support/torch/model_table.hpp"

#include <algorithm>

// Execution that depends on data, each kind on 1, 2 and 4 ranks, against plain
// LibTorch (R11 to R20, R35, R36); and if backward computes it again (R52),
// with arguments that were in a file meanwhile (R57).

using namespace smp;
using namespace smp::test;

namespace {

using again = model_options::again;
using none = std::vector<std::string>;
using tensors = std::vector<Tensor>;

/// x: [rows, 6], another one for each step; of the second, no row of the first
/// microbatches has a first element above 0.
tensors batches(int64_t rows = 8) {
  tensors result;
  for (int i = 0; i < 3; ++i) {
    auto x = torch::arange(rows * width).view({rows, width});
    result.push_back(torch::sin(x * (i + 1) * 0.7 + i) * (i + 1));
  }
  result[1].slice(0, 2, 6).select(1, 0).abs_().neg_();
  return result;
}

/// What computes again on 1, 2 and 4 ranks, waiting for each answer and not.
std::vector<model_options> recomputing() {
  std::vector<model_options> result;
  for (auto recompute : {again::outermost, again::all})
    for (uint64_t ranks : {1, 2, 4})
      for (auto fast : {false, true}) {
        if (fast && ranks == 1)
          continue;
        auto& x = result.emplace_back();
        x.recompute = recompute;
        x.ranks = ranks;
        x.fast = fast;
        x.microbatches = ranks == 2 ? 4 : 2;
      }
  return result;
}

std::string text_of(const model_options& x) {
  return std::string{x.recompute == again::all ? "all" : "outermost"} + ", "
         + std::to_string(x.ranks) + " ranks"
         + (x.fast == true ? ", fast" : "");
}

void check_placements(const small_model& model) {
  for (auto& x : all_placements()) {
    INFO(model.what << ": " << x.ranks << " ranks, " << x.microbatches
                    << " microbatches, " << x.pipeline);
    CHECK(model.differences(x, batches(), model.run(x, batches())) == none{});
  }
}

} // namespace

TEST_CASE("what depends on data has the numbers of one process",
          "[runtime][models][R19]") {
  check_placements(GENERATE(from_range(small_models)));
}

TEST_CASE("a model whose own code changes a buffer runs in order",
          "[runtime][R19]") {
  check_placements(of<root_state>("a buffer of the root"));
}

TEST_CASE("what depends on data is computed again", "[runtime][R52][R19]") {
  auto model = GENERATE(from_range(small_models));
  for (auto& x : recomputing()) {
    INFO(model.what << ": " << text_of(x));
    CHECK(model.differences(x, batches(), model.run(x, batches())) == none{});
  }
}

TEST_CASE("what depends on data finds its arguments in a file",
          "[runtime][R57][R19]") {
  auto model = GENERATE(from_range(small_models));
  if (!model.keeps_much)
    return;
  // An argument of a microbatch has 6 KB or 12 KB; below 4 KB it would stay.
  auto xs = batches(1024);
  for (auto& x : recomputing()) {
    x.offload = true;
    x.tolerance = 1e-4; // sums over more rows
    INFO(model.what << ": " << text_of(x));
    auto steps = model.run(x, xs);
    CHECK(model.differences(x, xs, steps) == none{});
    // With four of them, rank 0 may keep nothing itself.
    // What is wanted before it is written stays.
    CHECK((x.ranks == 4 || std::ranges::any_of(steps, [](auto& y) {
             return y.stats.offloaded_bytes > 0;
           })));
  }
}

TEST_CASE("a replayed step computes again", "[runtime][R52][R33]") {
  for (auto recompute : {again::outermost, again::all})
    for (auto fast : {false, true})
      for (auto fixed : {false, true}) {
        model_options x;
        x.recompute = recompute;
        x.fast = fast;
        x.microbatches = 4;
        x.replay = !fixed;
        x.fixed_order = fixed;
        INFO(text_of(x) << (fixed ? ", fixed order" : ""));
        // What goes on without its results is learnt first.
        x.steps = fast ? 8 : 3;
        tensors same(static_cast<size_t>(x.steps), batches()[0]);
        auto steps = run_ranks<nested>(x, same);
        CHECK(differences<nested>(x, same, steps) == none{});
        CHECK(steps.back().stats.replayed);
      }
}
