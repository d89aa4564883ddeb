#include "tests/support/catch.hpp"

#include "runtime/base/autocast.hpp"
#include "tests/support/assertion_lock.hpp"
#include "tests/support/torch_thread_group.hpp"
#include "tp/linears.hpp"

#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/functional/linear.h>

#include <string>
#include <vector>

// Linears of which each peer has some of the inputs against whole ones.

using namespace smp;
using namespace smp::test;
using torch::Tensor;

namespace {

/// Outputs of a peer in `blocks` blocks, along the last axis of `x`.
Tensor part_of(const Tensor& x, uint64_t peer, uint64_t peers, int64_t blocks) {
  return x.unflatten(-1, {blocks, static_cast<int64_t>(peers), -1})
    .select(-2, static_cast<int64_t>(peer))
    .flatten(-2);
}

struct linears {
  int64_t blocks = 1;
  std::vector<Tensor> weights; // [out, in]
  std::vector<Tensor> biases;  // [out], or undefined
  bool inputs_first = false;   // as in memory
};

/// Compares results and all gradients. @returns most collectives at one time
int check(uint64_t peers, Tensor x, const linears& all, double tolerance) {
  auto near = [&](const Tensor& a, const Tensor& b) {
    assertion_lock guard;
    CHECK(a.sizes() == b.sizes());
    CHECK(torch::allclose(a, b, tolerance, tolerance));
  };
  x = x.detach().requires_grad_();
  std::vector<Tensor> weights, biases, results, seeds;
  for (size_t i = 0; i < all.weights.size(); ++i) {
    weights.push_back(all.weights[i].detach().requires_grad_());
    biases.push_back(all.biases[i].defined()
                       ? all.biases[i].detach().requires_grad_()
                       : Tensor{});
    results.push_back(
      torch::nn::functional::linear(x, weights.back(), biases.back()));
    seeds.push_back(torch::randn_like(results.back()));
  }
  torch::autograd::backward(results, seeds);

  thread_group group{peers};
  group.on_all([&](uint64_t i) {
    auto n = static_cast<int64_t>(peers);
    auto k = static_cast<int64_t>(i);
    auto mine = x.detach().chunk(n, -1)[k].contiguous().requires_grad_();
    std::vector<Tensor> leaves, ws, bs;
    for (size_t j = 0; j < weights.size(); ++j) {
      auto w = weights[j].detach().chunk(n, 1)[k];
      leaves.push_back((all.inputs_first ? w.t() : w)
                         .clone(at::MemoryFormat::Contiguous)
                         .requires_grad_());
      ws.push_back(all.inputs_first ? leaves.back().t() : leaves.back());
      auto b = biases[j].defined() ? biases[j].detach().clone() : Tensor{};
      if (b.defined() && i > 0)
        b = b.narrow(0, 0, 0).clone();
      bs.push_back(b.defined() ? b.requires_grad_() : b);
    }
    auto ys = nn::reduced_linears_for_tp(mine, ws, bs, all.blocks);
    std::vector<Tensor> theirs;
    for (size_t j = 0; j < ys.size(); ++j) {
      near(ys[j].detach(), part_of(results[j].detach(), i, peers, all.blocks));
      theirs.push_back(part_of(seeds[j], i, peers, all.blocks));
    }
    torch::autograd::backward(ys, theirs);
    near(mine.grad(), x.grad().chunk(n, -1)[k]);
    for (size_t j = 0; j < ys.size(); ++j) {
      auto whole = weights[j].grad().chunk(n, 1)[k];
      near(leaves[j].grad(), all.inputs_first ? whole.t() : whole);
      if (bs[j].defined() && i == 0)
        near(bs[j].grad(), biases[j].grad());
      assertion_lock guard;
      CHECK(leaves[j].grad().is_contiguous());
    }
  });
  return group.most_under_way();
}

linears random_linears(const std::vector<int64_t>& outputs, int64_t inputs,
                       at::ScalarType type) {
  linears result;
  for (auto n : outputs) {
    result.weights.push_back(torch::randn({n, inputs}, type));
    result.biases.push_back(torch::randn({n}, type));
  }
  return result;
}

} // namespace

TEST_CASE("linears that peers add up are those of one process",
          "[tp][linears]") {
  torch::manual_seed(3);
  uint64_t peers = GENERATE(1, 2, 4);
  auto x = random_linears({24, 12, 24}, 8, at::kDouble);
  x.blocks = GENERATE(1, 3);
  x.inputs_first = GENERATE(false, true);
  x.biases[1] = Tensor{};
  check(peers, torch::randn({3, 5, 8}, at::kDouble), x, 1e-9);
}

TEST_CASE("one of them travels while the next is computed", "[tp][linears]") {
  torch::manual_seed(3);
  SECTION("of several") {
    auto x = random_linears({8, 8, 8}, 4, at::kDouble);
    CHECK(check(2, torch::randn({3, 4}, at::kDouble), x, 1e-9) == 2);
  }
  SECTION("of one that is large, by rows that cannot be divided") {
    auto x = random_linears({1536}, 8, at::kDouble);
    x.blocks = GENERATE(1, 3);
    CHECK(check(2, torch::randn({1033, 8}, at::kDouble), x, 1e-9) == 2);
  }
  SECTION("not of one that is small") {
    auto x = random_linears({8}, 4, at::kDouble);
    CHECK(check(2, torch::randn({3, 4}, at::kDouble), x, 1e-9) == 1);
  }
}

TEST_CASE("linears that peers add up take no rows", "[tp][linears]") {
  auto x = random_linears({8, 8}, 4, at::kDouble);
  check(2, torch::randn({0, 3, 4}, at::kDouble), x, 1e-9);
}

TEST_CASE(
  "peers go backward together where one of them adds a bias that trains",
  "[tp][linears]") {
  thread_group group{2};
  group.on_all([](uint64_t i) {
    auto w = torch::ones({4, 2});
    auto b = torch::ones({i == 0 ? 4 : 0}).requires_grad_();
    auto y = nn::reduced_linears_for_tp(torch::ones({3, 2}), {&w, 1}, {&b, 1},
                                        1);
    y.front().sum().backward();
    assertion_lock guard;
    CHECK(b.grad().sum().item<double>() == (i == 0 ? 12 : 0));
  });
}
