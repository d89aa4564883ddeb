#include "tests/support/catch.hpp"

#include "runtime/optimizer/gradient_norm.hpp"
#include "runtime/train/models/gpt.hpp"
#include "tests/support/torch/training_step.hpp"
#include "tests/support/torch/two_ranks.hpp"

#include <torch/optim/sgd.h>
#include <torch/types.h>

#include <cmath>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

// The norm of all gradients, and with it what clipping makes of them, does not
// depend on which rank has which: measured times decide that, and differ from
// run to run.

using namespace smp;

namespace {

double sum_of_squares(const at::Tensor& x) {
  return sums_of_squares({x}).front();
}

} // namespace
using namespace smp::test;

namespace {

constexpr int64_t words = 32, tokens = 8;
constexpr size_t layers = 4;

gpt make_gpt() {
  model_sizes x;
  x.vocabulary = words;
  x.sequence_length = tokens;
  x.layers = layers;
  x.heads = 2;
  x.width = 16;
  return gpt{x};
}

/// @param first so many layers are on the first of two ranks
/// @returns the norms of some steps
std::vector<double> norms_of(uint64_t ranks, size_t first) {
  auto world = manual_world(ranks);
  std::vector<double> result;
  std::mutex mutex;
  run_virtual_world(ranks, world, [&](session& s) {
    auto whole = seeded(make_gpt);
    for (size_t i = first; i < layers; ++i)
      set_partition(*whole->transformer->h->ptr(i), 1);
    distributed_model model{whole};
    torch::optim::SGD sgd{model->parameters(), 0.1};
    distributed_optimizer optimizer{sgd};
    auto train_step = step([&](Tensor x) {
      auto loss = token_loss(model(x), x);
      model.backward(loss);
      return loss.detach();
    });
    for (int64_t i = 0; i < 8; ++i) {
      optimizer.zero_grad();
      train_step((torch::arange(4 * tokens).view({4, tokens}) * (7 + i) + 3)
                 % words);
      auto norm = clip_grad_norm_(model, 0.5);
      optimizer.step();
      std::unique_lock guard{mutex};
      if (s.rank() == 0)
        result.push_back(norm);
    }
  });
  return result;
}

/// A number whose square, added to a large float, is rounded off, and so many
/// that a sum of floats is some tenths of a percent too small.
constexpr double element = 1.0077;
constexpr int64_t many = int64_t{1} << 22;

double squares_in_float64(const Tensor& x) {
  auto wide = x.to(x.is_complex() ? torch::kComplexDouble : torch::kDouble);
  return wide.abs().square().sum().item<double>();
}

} // namespace

TEST_CASE("the norm of gradients has the same bits in every partition",
          "[runtime][optimizer][R33]") {
  auto expected = norms_of(1, layers);
  REQUIRE(expected.size() == 8);
  for (size_t first = 0; first < layers; ++first) {
    CAPTURE(first);
    CHECK(norms_of(2, first) == expected);
  }
}

TEST_CASE("squares of a long gradient add up to the same in any pieces",
          "[runtime][optimizer][R22]") {
  auto x = torch::full({many}, element);
  auto grid = x.view({1 << 11, -1});
  auto rows = torch::arange(1 << 11).div(2, "floor");
  const std::map<std::string, Tensor> gradients = {
    {"float", x},
    {"half", x.to(torch::kHalf)},
    {"bfloat16", x.to(torch::kBFloat16)},
    {"double", x.to(torch::kDouble)},
    {"complex", torch::view_as_complex(grid.view({-1, 2}))},
    {"conjugate", torch::view_as_complex(grid.view({-1, 2})).conj()},
    {"transposed", grid.t()},
    {"with gaps", grid.slice(1, 1, 1 << 11, 3)},
    {"repeated", torch::full({1}, element).expand({many})},
    {"sparse, each row twice",
     torch::sparse_coo_tensor(rows.view({1, -1}), grid, grid.sizes())},
    {"scalar", torch::tensor(element)},
    {"empty", torch::zeros({0, 3})},
    {"too large for a square in float", torch::full({37}, 1e30)},
    {"too small", torch::full({37}, 1e-30)},
  };
  for (auto& [name, gradient] : gradients) {
    CAPTURE(name);
    auto dense = gradient.is_sparse() ? gradient.to_dense() : gradient;
    auto expected = squares_in_float64(dense);
    CHECK(sum_of_squares(gradient) == Catch::Approx(expected).epsilon(1e-10));
    if (gradient.is_sparse() || gradient.dim() == 0)
      continue;
    double sum = 0;
    for (auto& piece : gradient.chunk(3))
      sum += sum_of_squares(piece);
    CHECK(sum == Catch::Approx(expected).epsilon(1e-10));
  }
  CHECK(std::isnan(sum_of_squares(torch::tensor({1.0, std::nan(""), 2.0}))));
  CHECK(std::isinf(sum_of_squares(torch::tensor({1.0f, INFINITY}))));
}

TEST_CASE("the norm of a long gradient is right in each digit",
          "[runtime][optimizer][R22]") {
  run_virtual_world(1, manual_world(1), [](session&) {
    distributed_model model{
      function{[](function_impl& m, Tensor x) { return m.weight.sum() * x; },
               torch::zeros({many})}};
    auto train_step = training_step(model, sum_of);
    train_step(torch::full({1}, element));
    auto expected = static_cast<float>(element) * std::sqrt(double{many});
    auto norm = clip_grad_norm_(model, INFINITY);
    if (std::abs(norm / expected - 1) > 1e-9)
      throw std::runtime_error{"norm " + std::to_string(norm) + " instead of "
                               + std::to_string(expected)};
  });
}
