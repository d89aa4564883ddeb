// ctest: timeout=300
#include "tests/support/catch.hpp"

#include "tests/support/torch_models.hpp"
#include "tests/support/torch_small_models.hpp"

#include <atomic>
#include <random>

// Stateful modules anywhere, called in any way: the order of one process, and
// no deadlock (R19).

using namespace smp;
using namespace smp::test;

namespace {

std::atomic<uint32_t> program_seed = 0;

/// Even seeds call each module equally often in all microbatches.
bool is_static() {
  return program_seed % 2 == 0;
}

template <template <class> class P>
struct nest : torch::nn::Module {
  nest() {
    register_module("state", state);
    register_module("fc", fc);
  }
  Tensor forward(Tensor x, int64_t n) {
    for (int64_t i = 0; i < n; ++i)
      x = state(torch::tanh(fc(x)));
    return x;
  }
  P<torch::nn::ModuleHolder<counter<P>>> state;
  P<Linear> fc{width, width};
};

/// Random calls of the same few modules.
template <template <class> class P>
struct program : torch::nn::Module {
  program() {
    for (int i = 0; i < 3; ++i) {
      auto n = std::to_string(i);
      linears.emplace_back(width, width);
      register_module("fc" + n, linears.back());
      counters.emplace_back();
      register_module("state" + n, counters.back());
      nests.emplace_back();
      register_module("nest" + n, nests.back());
    }
  }

  Tensor forward(Tensor x) {
    std::mt19937 rng{program_seed};
    auto y = x;
    auto positive = [&] { return y.sum().template item<double>() > 0; };
    for (auto n = 3 + rng() % 6; n > 0; --n) {
      auto i = rng() % 3;
      switch (rng() % 4) {
        case 0:
          y = torch::tanh(linears[i](y)) + y * 0.1;
          break;
        case 1:
          y = counters[i](y);
          break;
        case 2:
          y = nests[i](y, is_static() ? 1 + rng() % 2 : positive() ? 2 : 0);
          break;
        default:
          if (is_static() || positive())
            y = counters[i](torch::tanh(linears[i](y)));
      }
    }
    return torch::tanh(y).square().mean();
  }

  std::vector<P<Linear>> linears;
  std::vector<P<torch::nn::ModuleHolder<counter<P>>>> counters;
  std::vector<P<torch::nn::ModuleHolder<nest<P>>>> nests;
};

} // namespace

TEST_CASE("random programs over stateful modules end like one process",
          "[runtime][R19]") {
  std::vector<Tensor> batches;
  for (int i = 0; i < 3; ++i)
    batches.push_back(
      torch::sin(torch::arange(4 * width * 1.0) * (i + 1)).view({4, width}));
  // Steps that went wrong because a call came that nobody could expect.
  int repeated = 0;
  int repeated_before = 0;
  for (uint32_t seed = 0; seed < 200; ++seed) {
    program_seed = seed;
    model_options x;
    x.ranks = 2 + seed % 3;
    x.microbatches = 4;
    x.pipeline = seed % 5 == 0 ? "simple" : "interleaved";
    x.seed = seed;
    INFO("seed " << seed);
    auto steps = run_ranks<program>(x, batches);
    REQUIRE(differences<program>(x, batches, steps)
            == std::vector<std::string>{});
    for (auto& y : steps)
      repeated += y.repeated;
    if (is_static())
      REQUIRE(repeated == repeated_before);
    repeated_before = repeated;
  }
}
