#include "tests/support/catch.hpp"

#include "tests/support/torch/models.hpp"
#include "tests/support/torch/small_models.hpp"

// Small models that backward computes again have the numbers of plain LibTorch,
// which keeps what it computes (R52).

using namespace smp;
using namespace smp::test;

namespace {

using again = model_options::again;
using none = std::vector<std::string>;

/// x: [8, 6], another one for each step.
std::vector<Tensor> batches() {
  std::vector<Tensor> result;
  for (int i = 0; i < 3; ++i) {
    auto x = torch::arange(8 * width).view({8, width});
    result.push_back(torch::sin(x * (i + 1) * 0.7 + i) * (i + 1));
  }
  result[1].slice(0, 2, 6).select(1, 0).abs_().neg_();
  return result;
}

/// On 1, 2 and 4 ranks, waiting for each answer and not.
template <template <template <class> class> class Impl>
void check_all() {
  for (auto recompute : {again::outermost, again::all})
    for (uint64_t ranks : {1, 2, 4})
      for (auto fast : {false, true}) {
        if (fast && ranks == 1)
          continue;
        model_options x;
        x.recompute = recompute;
        x.ranks = ranks;
        x.fast = fast;
        x.microbatches = ranks == 2 ? 4 : 2;
        INFO((recompute == again::all ? "all" : "outermost")
             << ", " << ranks << " ranks" << (fast ? ", fast" : ""));
        CHECK(differences<Impl>(x, batches()) == none{});
      }
}

} // namespace

TEST_CASE("branches are taken again", "[runtime][R52]") {
  check_all<branch>();
}

TEST_CASE("a loop ends early again", "[runtime][R52]") {
  check_all<early_exit>();
}

TEST_CASE("modules that are used several times are computed again",
          "[runtime][R52]") {
  check_all<reused>();
}

TEST_CASE("what is not called is not computed again", "[runtime][R52]") {
  check_all<sometimes>();
}

TEST_CASE("sizes are those of the microbatch again", "[runtime][R52]") {
  check_all<sizes>();
}

TEST_CASE("results without a gradient get none", "[runtime][R52]") {
  check_all<outputs>();
}

TEST_CASE("modules without tensors that have a gradient are computed again",
          "[runtime][R52]") {
  check_all<integers>();
}

TEST_CASE("what is frozen is kept as it is", "[runtime][R52]") {
  check_all<frozen>();
}

TEST_CASE("dropout drops the same again", "[runtime][R52]") {
  check_all<teacher>();
}

TEST_CASE("arguments that the call writes into are as they were",
          "[runtime][R52]") {
  check_all<in_place>();
}

TEST_CASE("parameters as arguments get their gradients", "[runtime][R52]") {
  check_all<weight_argument>();
}

TEST_CASE("calls from rank to rank and back are made again", "[runtime][R52]") {
  check_all<nested>();
}

TEST_CASE("batch norms count each microbatch once", "[runtime][R52][R19]") {
  check_all<norms>();
}

TEST_CASE("results that depend on a buffer depend on what it was",
          "[runtime][R52][R19]") {
  check_all<counters>();
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
        INFO((recompute == again::all ? "all" : "outermost")
             << (fast ? ", fast" : "") << (fixed ? ", fixed order" : ""));
        // What goes on without its results is learnt first.
        x.steps = fast ? 8 : 3;
        std::vector<Tensor> same(static_cast<size_t>(x.steps), batches()[0]);
        auto steps = run_ranks<nested>(x, same);
        CHECK(differences<nested>(x, same, steps) == none{});
        CHECK(steps.back().stats.replayed);
      }
}
