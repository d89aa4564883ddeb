#include "tests/support/catch.hpp"

#include "tests/support/torch/models.hpp"
#include "tests/support/torch/small_models.hpp"

// Execution that depends on data, each kind on 1, 2 and 4 ranks, against plain
// LibTorch (R11 to R20, R35, R36).

using namespace smp;
using namespace smp::test;

namespace {

/// x: [8, 6], another one for each step; for some, no row has a first element
/// above 0.
std::vector<Tensor> batches() {
  std::vector<Tensor> result;
  for (int i = 0; i < 3; ++i) {
    auto x = torch::arange(8 * width).view({8, width});
    result.push_back(torch::sin(x * (i + 1) * 0.7 + i) * (i + 1));
  }
  result[1].slice(0, 2, 6).select(1, 0).abs_().neg_();
  return result;
}

template <template <template <class> class> class Impl>
void check_all() {
  for (auto& x : all_placements()) {
    INFO(x.ranks << " ranks, " << x.microbatches << " microbatches, "
                 << x.pipeline);
    CHECK(differences<Impl>(x, batches()) == std::vector<std::string>{});
  }
}

} // namespace

TEST_CASE("a branch on a tensor", "[runtime][models]") {
  check_all<branch>();
}

TEST_CASE("an early exit from a loop over modules", "[runtime][models]") {
  check_all<early_exit>();
}

TEST_CASE("modules that are used again", "[runtime][models]") {
  check_all<reused>();
}

TEST_CASE("modules that are called never or only sometimes",
          "[runtime][models]") {
  check_all<sometimes>();
}

TEST_CASE("sizes that differ between microbatches", "[runtime][models]") {
  check_all<sizes>();
}

TEST_CASE("outputs without use or without gradient", "[runtime][models]") {
  check_all<outputs>();
}

TEST_CASE("inputs without gradient", "[runtime][models]") {
  check_all<integers>();
}

TEST_CASE("frozen parameters", "[runtime][models]") {
  check_all<frozen>();
}

TEST_CASE("modules under no_grad inside of forward", "[runtime][models]") {
  check_all<teacher>();
}

TEST_CASE("operations in place on arguments", "[runtime][models]") {
  check_all<in_place>();
}

TEST_CASE("a parameter as an argument of a module on another rank",
          "[runtime][models]") {
  check_all<weight_argument>();
}

TEST_CASE("calls from rank to rank and back, with structured arguments",
          "[runtime][models]") {
  check_all<nested>();
}

TEST_CASE("batch norms see the microbatches in order", "[runtime][R19]") {
  check_all<norms>();
}

TEST_CASE("results that depend on a buffer are those of one process",
          "[runtime][R19]") {
  check_all<counters>();
}

TEST_CASE("a model whose own code changes a buffer runs in order",
          "[runtime][R19]") {
  check_all<root_state>();
}
