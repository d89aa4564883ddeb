#include "tests/support/catch.hpp"

#include "tests/support/torch/models.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/nn/modules/linear.h>

#include <tuple>

// Which arguments a gradient reaches is for their owners to say, whether the
// call waits or goes on (R40): what is not reached has no gradient, as in one
// process, and not one of zeros.

using namespace smp;
using namespace smp::test;
using torch::nn::Linear;

namespace {

constexpr int64_t width = 300; // of two rows, more than ride in a message

/// Of its results the first depends on its first argument only, the second on
/// its second one, and the third on none.
template <template <class> class P>
struct crossing : torch::nn::Module {
  crossing() {
    register_module("fc", fc);
  }
  std::tuple<Tensor, Tensor, Tensor> forward(Tensor a, Tensor b) {
    return {fc(a), torch::tanh(b), (a * b).detach()};
  }
  Linear fc{width, width};
};

/// Calls that of another rank: what reaches its arguments is what that one
/// said.
template <template <class> class P>
struct around : torch::nn::Module {
  around() {
    register_module("inner", inner);
  }
  std::tuple<Tensor, Tensor> forward(Tensor a, Tensor b) {
    auto [x, y, none] = inner(a, b);
    return {x * 2, y + none};
  }
  P<torch::nn::ModuleHolder<crossing<P>>> inner;
};

/// `a` and `b` are made by modules of their own; of what comes back only the
/// part of one of them is used. Which one is a matter of the step.
template <template <class> class P>
struct half_used : torch::nn::Module {
  half_used() {
    register_module("a", a);
    register_module("b", b);
    register_module("outer", outer);
    to(torch::kDouble);
  }
  Tensor forward(Tensor x) {
    auto first = x[0][0].template item<double>() > 0;
    auto [y, z] = outer(a(x), b(x));
    return (first ? y : z).square().mean();
  }
  P<Linear> a{width, width}, b{width, width};
  P<torch::nn::ModuleHolder<around<P>>> outer;
};

/// Steps use the part of `a`, of `b`, and again.
std::vector<Tensor> batches() {
  std::vector<Tensor> result;
  for (auto sign : {1.0, -1.0, 1.0, -1.0})
    result.push_back(torch::full({4, width}, sign, torch::kDouble));
  return result;
}

} // namespace

TEST_CASE("a gradient reaches what it reaches in one process",
          "[runtime][fast][R40]") {
  struct row {
    bool fast;
    std::vector<std::string> no_promises;
  };
  auto r = GENERATE(row{false, {}}, row{true, {}}, row{true, {"outer.inner"}},
                    row{true, {"outer"}}, row{true, {"a", "outer.inner"}});
  auto ranks = GENERATE(2u, 3u, 4u);
  model_options x;
  x.ranks = ranks;
  x.microbatches = 2;
  x.steps = 4;
  x.fast = r.fast;
  x.no_promises = r.no_promises;
  INFO(fmt::format("{} ranks, {}, {} wait", ranks, r.fast ? "fast" : "blocking",
                   fmt::join(r.no_promises, ", ")));
  auto steps = run_ranks<half_used>(x, batches());
  CHECK(differences<half_used>(x, batches(), steps)
        == std::vector<std::string>{});
  // Of a and of b, the weight and the bias of one, and of fc if a is used.
  REQUIRE(steps.size() == 4);
  for (size_t i = 0; i < steps.size(); ++i) {
    CHECK(steps[i].gradients.contains("a.weight") == (i % 2 == 0));
    CHECK(steps[i].gradients.contains("b.weight") == (i % 2 == 1));
    CHECK(steps[i].gradients.contains("outer.inner.fc.weight") == (i % 2 == 0));
  }
}
