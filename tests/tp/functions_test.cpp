#include "tests/support/catch.hpp"

#include "tests/support/error_of.hpp"
#include "tests/support/torch/thread_group.hpp"
#include "tp/cross_entropy.hpp"
#include "tp/functions.hpp"
#include "tp/layer_norm.hpp"
#include "tp/linears.hpp"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/autograd.h>

#include <functional>
#include <optional>
#include <string>
#include <vector>

using namespace smp;
using namespace smp::test;
using Catch::Matchers::ContainsSubstring;
using torch::Tensor;

namespace {

using function = std::function<Tensor(const Tensor&)>;

struct evaluated {
  std::vector<Tensor> inputs;  // by peer
  std::vector<Tensor> outputs; // the same
  std::vector<Tensor> seeds;   // of backward
  std::vector<Tensor> grads;
};

/// Runs `f` forward and backward on all peers, on random numbers that are
/// theirs or, if `same`, everybody's.
evaluated run(uint64_t peers, const std::vector<int64_t>& sizes,
              const function& f, bool same_inputs = false,
              bool same_seeds = false, bool same_samples = false) {
  torch::manual_seed(7);
  evaluated x;
  for (uint64_t i = 0; i < peers; ++i) {
    auto fresh = torch::randn(sizes, torch::kDouble);
    x.inputs.push_back(i > 0 && same_inputs ? x.inputs[0].clone() : fresh);
  }
  x.outputs.resize(peers);
  x.grads.resize(peers);
  thread_group group{peers, same_samples};
  group.on_all(
    [&](uint64_t i) { x.outputs[i] = f(x.inputs[i].requires_grad_()); });
  for (uint64_t i = 0; i < peers; ++i) {
    auto fresh = torch::randn(x.outputs[i].sizes(), torch::kDouble);
    x.seeds.push_back(i > 0 && same_seeds ? x.seeds[0].clone() : fresh);
  }
  group.on_all([&](uint64_t i) {
    x.grads[i] = torch::autograd::grad({x.outputs[i]}, {x.inputs[i]},
                                       {x.seeds[i]})
                   .at(0);
  });
  return x;
}

double dot(const std::vector<Tensor>& a, const std::vector<Tensor>& b) {
  double result = 0;
  for (size_t i = 0; i < a.size(); ++i)
    result += (a[i].detach() * b[i].detach()).sum().item<double>();
  return result;
}

/// A linear function of what all peers have, and its transpose.
void check_transposed(const evaluated& x) {
  CHECK(dot(x.outputs, x.seeds)
        == Catch::Approx(dot(x.inputs, x.grads)).epsilon(1e-9));
}

bool near(const Tensor& a, const Tensor& b) {
  return a.sizes() == b.sizes() && torch::allclose(a, b, 1e-9, 1e-12);
}

} // namespace

TEST_CASE("what peers have is gathered along an axis, and its gradient summed",
          "[tp][functions]") {
  uint64_t peers = GENERATE(1, 2, 4);
  int64_t dim = GENERATE(0, 1, -1);
  auto x = run(peers, {2, 3, 4},
               [&](auto& y) { return nn::fused_allgather_for_tp(y, dim); });
  for (auto& y : x.outputs)
    CHECK(near(y, torch::cat(x.inputs, dim)));
  check_transposed(x);
}

TEST_CASE("sums are scattered along an axis", "[tp][functions]") {
  uint64_t peers = GENERATE(1, 2, 4);
  int64_t dim = GENERATE(0, 1, -2);
  auto x = run(peers, {4, 8, 3},
               [&](auto& y) { return nn::reduce_scatter_for_tp(y, dim); });
  auto sum = torch::stack(x.inputs).sum(0);
  for (size_t i = 0; i < peers; ++i)
    CHECK(
      near(x.outputs[i], sum.chunk(static_cast<int64_t>(peers), dim).at(i)));
  check_transposed(x);
}

TEST_CASE("slices change places and merge along another axis",
          "[tp][functions]") {
  uint64_t peers = GENERATE(1, 2, 4);
  auto axes = GENERATE(std::pair{0, 1}, std::pair{-1, 0}, std::pair{2, 2});
  auto split = axes.first;
  auto merge = axes.second;
  auto x = run(peers, {4, 3, 8}, [&](auto& y) {
    return nn::scatter_and_merge_for_tp(y, split, merge);
  });
  for (size_t i = 0; i < peers; ++i) {
    std::vector<Tensor> parts;
    for (auto& y : x.inputs)
      parts.push_back(y.chunk(static_cast<int64_t>(peers), split).at(i));
    CHECK(near(x.outputs[i], torch::cat(parts, merge)));
  }
  check_transposed(x);
}

TEST_CASE("a value that all peers have is summed in one of both phases",
          "[tp][functions]") {
  uint64_t peers = GENERATE(1, 2, 4);
  auto forward = run(peers, {3, 2},
                     [](auto& y) { return nn::fwd_allreduce_for_tp(y); });
  for (size_t i = 0; i < peers; ++i) {
    CHECK(near(forward.outputs[i], torch::stack(forward.inputs).sum(0)));
    CHECK(near(forward.grads[i], forward.seeds[i]));
  }
  auto backward = run(
    peers, {3, 2}, [](auto& y) { return nn::bwd_allreduce_for_tp(y); }, true);
  for (size_t i = 0; i < peers; ++i) {
    CHECK(near(backward.outputs[i], backward.inputs[i]));
    CHECK(near(backward.grads[i], torch::stack(backward.seeds).sum(0)));
  }
}

TEST_CASE(
  "each peer takes its slice of what all have, and all have its "
  "gradient",
  "[tp][functions]") {
  uint64_t peers = GENERATE(1, 2, 4);
  auto x = run(
    peers, {3, 8}, [](auto& y) { return nn::narrow_for_tp(y, 1); }, true);
  for (size_t i = 0; i < peers; ++i) {
    CHECK(near(x.outputs[i],
               x.inputs[i].chunk(static_cast<int64_t>(peers), 1).at(i)));
    CHECK(near(x.grads[i], torch::cat(x.seeds, 1)));
  }
}

TEST_CASE("what peers have becomes a value that all have, and its gradient cut",
          "[tp][functions]") {
  uint64_t peers = GENERATE(1, 2, 4);
  int64_t dim = GENERATE(0, 1, -1);
  auto x = run(
    peers, {2, 3, 4}, [&](auto& y) { return nn::merge_for_tp(y, dim); }, false,
    true);
  for (size_t i = 0; i < peers; ++i) {
    CHECK(near(x.outputs[i], torch::cat(x.inputs, dim)));
    CHECK(near(x.grads[i],
               x.seeds[0].chunk(static_cast<int64_t>(peers), dim).at(i)));
  }
}

namespace {

Tensor part_of(const Tensor& x, uint64_t peers, int64_t dim, size_t i) {
  return x.chunk(static_cast<int64_t>(peers), dim).at(i);
}

std::vector<Tensor> parts_of(const std::vector<Tensor>& xs, int64_t dim,
                             size_t i) {
  std::vector<Tensor> result;
  for (auto& x : xs)
    result.push_back(part_of(x, xs.size(), dim, i));
  return result;
}

} // namespace

TEST_CASE("peers with samples of their own gather, cut and merge them",
          "[tp][functions]") {
  uint64_t peers = GENERATE(1, 2, 4);
  const std::vector<int64_t> sizes{4, 3, 8};
  auto gather = run(peers, sizes, nn::gather_batch_for_tp);
  auto scatter = run(peers, sizes, nn::scatter_batch_for_tp);
  auto split = run(peers, sizes,
                   [](auto& x) { return nn::split_batch_for_tp(x, -1); });
  auto merge = run(peers, sizes,
                   [](auto& x) { return nn::merge_batch_for_tp(x, -1); });
  auto slices = run(peers, sizes,
                    [](auto& x) { return nn::gather_slices_for_tp(x, 1); });
  for (size_t i = 0; i < peers; ++i) {
    CHECK(near(gather.outputs[i], torch::cat(gather.inputs)));
    auto sum = torch::stack(scatter.inputs).sum(0);
    CHECK(near(scatter.outputs[i], part_of(sum, peers, 0, i)));
    CHECK(near(split.outputs[i], torch::cat(parts_of(split.inputs, -1, i))));
    CHECK(near(merge.outputs[i], torch::cat(parts_of(merge.inputs, 0, i), -1)));
    CHECK(near(slices.outputs[i], torch::cat(slices.inputs, 1)));
  }
  for (auto* x : {&gather, &scatter, &split, &merge, &slices})
    check_transposed(*x);
}

TEST_CASE("peers with the same samples sum, cut and merge them",
          "[tp][functions]") {
  uint64_t peers = GENERATE(1, 2, 4);
  const std::vector<int64_t> sizes{4, 3, 8};
  // What all have, they have once; its gradient, too.
  auto take = [&](const function& f) {
    auto x = run(peers, sizes, f, true, false, true);
    for (auto& y : x.grads)
      CHECK(near(y, x.grads[0]));
    x.inputs.resize(1);
    check_transposed({x.inputs, x.outputs, x.seeds, {x.grads[0]}});
    return x;
  };
  auto give = [&](const function& f) {
    auto x = run(peers, sizes, f, false, true, true);
    for (auto& y : x.outputs)
      CHECK(near(y, x.outputs[0]));
    CHECK(dot({x.outputs[0]}, {x.seeds[0]})
          == Catch::Approx(dot(x.inputs, x.grads)).epsilon(1e-9));
    return x;
  };
  auto gather = take(nn::gather_batch_for_tp);
  auto split = take([](auto& x) { return nn::split_batch_for_tp(x, -1); });
  for (size_t i = 0; i < peers; ++i) {
    CHECK(near(gather.outputs[i], gather.inputs[0]));
    CHECK(near(split.outputs[i], part_of(split.inputs[0], peers, -1, i)));
  }
  auto scatter = give(nn::scatter_batch_for_tp);
  auto merge = give([](auto& x) { return nn::merge_batch_for_tp(x, -1); });
  auto slices = give([](auto& x) { return nn::gather_slices_for_tp(x, 1); });
  CHECK(near(scatter.outputs[0], torch::stack(scatter.inputs).sum(0)));
  CHECK(near(merge.outputs[0], torch::cat(merge.inputs, -1)));
  CHECK(near(slices.outputs[0], torch::cat(slices.inputs, 1)));
}

TEST_CASE("peers exchange different numbers of rows, and their gradients",
          "[tp][functions]") {
  constexpr uint64_t peers = 3;
  // Row i, column k: what peer i has for peer k.
  const std::vector<std::vector<int64_t>> counts{
    {2, 0, 1}, {4, 1, 0}, {0, 3, 0}};
  auto of_column = [&](uint64_t k) {
    return std::vector{counts[0][k], counts[1][k], counts[2][k]};
  };
  torch::manual_seed(5);
  std::vector<Tensor> given, seeds, outputs(peers), grads(peers);
  for (uint64_t i = 0; i < peers; ++i) {
    auto sum = [](const std::vector<int64_t>& x) { return x[0] + x[1] + x[2]; };
    given.push_back(torch::randn({sum(counts[i]), 2}, torch::kDouble));
    seeds.push_back(torch::randn({sum(of_column(i)), 2}, torch::kDouble));
  }
  thread_group{peers}.on_all([&](uint64_t i) {
    auto x = given[i].clone().requires_grad_();
    auto y = nn::exchange_rows_for_tp(x, counts[i], of_column(i));
    outputs[i] = y.detach();
    grads[i] = torch::autograd::grad({(y * seeds[i]).sum()}, {x}).at(0);
  });
  // By hand: the rows of peer i for peer k.
  auto rows = [](const Tensor& x, const std::vector<int64_t>& sizes,
                 uint64_t k) { return x.split_with_sizes(sizes)[k]; };
  for (uint64_t k = 0; k < peers; ++k) {
    std::vector<Tensor> taken, back;
    for (uint64_t i = 0; i < peers; ++i) {
      taken.push_back(rows(given[i], counts[i], k));
      back.push_back(rows(seeds[i], of_column(i), k));
    }
    CHECK(near(outputs[k], torch::cat(taken)));
    CHECK(near(grads[k], torch::cat(back)));
  }
}

// Megatron's pair of layers: a product cut by outputs, then one cut by inputs.
TEST_CASE("functions nest", "[tp][functions]") {
  constexpr uint64_t peers = 2;
  torch::manual_seed(3);
  auto a = torch::randn({8, 5}, torch::kDouble).requires_grad_();
  auto b = torch::randn({4, 8}, torch::kDouble).requires_grad_();
  auto x = torch::randn({3, 5}, torch::kDouble).requires_grad_();
  auto expected = torch::relu(x.matmul(a.t())).matmul(b.t());
  auto of_x = torch::autograd::grad({expected.square().sum()}, {x, a, b});
  thread_group group{peers};
  std::vector<Tensor> outputs(peers), grads(peers);
  group.on_all([&](uint64_t i) {
    auto k = static_cast<int64_t>(i);
    auto mine = x.detach().clone().requires_grad_();
    auto up = a.detach().chunk(2, 0).at(i);
    auto down = b.detach().chunk(2, 1).at(i);
    auto h = nn::bwd_allreduce_for_tp(mine).matmul(up.t());
    auto y = nn::fwd_allreduce_for_tp(torch::relu(h).matmul(down.t()));
    outputs[static_cast<size_t>(k)] = y.detach();
    grads[i] = torch::autograd::grad({y.square().sum()}, {mine}).at(0);
  });
  for (size_t i = 0; i < peers; ++i) {
    CHECK(near(outputs[i], expected.detach()));
    CHECK(near(grads[i], of_x[0]));
  }
}

// As in an evaluation: what they give is what they give with grad.
TEST_CASE("without grad the functions exchange what they do with it",
          "[tp][functions]") {
  constexpr uint64_t peers = 2;
  const std::vector<function> all{
    [](auto& x) { return nn::fused_allgather_for_tp(x, 0); },
    [](auto& x) { return nn::reduce_scatter_for_tp(x, 0); },
    [](auto& x) { return nn::scatter_and_merge_for_tp(x, 0, 1); },
    [](auto& x) {
      return nn::exchange_rows_for_tp(x, {2, 2}, {2, 2});
    },
    [](auto& x) { return nn::fwd_allreduce_for_tp(x); },
    [](auto& x) { return nn::bwd_allreduce_for_tp(x); },
    [](auto& x) { return nn::narrow_for_tp(x, 0); },
    [](auto& x) { return nn::merge_for_tp(x, 0); }};
  for (size_t k = 0; k < all.size(); ++k) {
    CAPTURE(k);
    auto with = run(peers, {4, 6}, all[k]);
    std::vector<Tensor> without(peers);
    thread_group{peers}.on_all([&](uint64_t i) {
      at::NoGradGuard no_grad;
      without[i] = all[k](with.inputs[i]);
    });
    for (uint64_t i = 0; i < peers; ++i) {
      // One of them does nothing forward, and gives what it gets.
      CHECK(
        (without[i].is_same(with.inputs[i]) || !without[i].requires_grad()));
      CHECK(near(without[i], with.outputs[i].detach()));
    }
  }
}

TEST_CASE("what cannot be cut is refused by name", "[tp][functions]") {
  thread_group group{2};
  auto told = [&](const function& f) {
    try {
      group.on_all([&](uint64_t) { f(torch::ones({3, 4})); });
    } catch (const std::exception& e) {
      return std::string{e.what()};
    }
    return std::string{"no error"};
  };
  CHECK_THAT(told([](auto& x) { return nn::reduce_scatter_for_tp(x, 0); }),
             ContainsSubstring("axis 0 of size 3 cannot be divided among 2 "
                               "tensor-parallel ranks"));
  CHECK_THAT(told([](auto& x) { return nn::fused_allgather_for_tp(x, 2); }),
             ContainsSubstring("axis 2 of a tensor of 2 axes"));
  CHECK_THAT(error_of([] { nn::narrow_for_tp(torch::ones({2}), 0); },
                      error_code::unsupported),
             ContainsSubstring("outside of a step"));
}

TEST_CASE("second derivatives through what peers compute together are refused",
          "[tp][functions]") {
  const std::vector<Tensor> none(1),
    weight{torch::eye(4, torch::kDouble).requires_grad_()};
  const auto labels = torch::tensor({0, 1, 2, 3, 4, 5, 6, 7});
  const std::vector<function> all = {
    [](auto& x) { return nn::fused_allgather_for_tp(x, 0); },
    [](auto& x) { return nn::reduce_scatter_for_tp(x, 0); },
    [](auto& x) { return nn::scatter_and_merge_for_tp(x, 0, 1); },
    [](auto& x) {
      return nn::exchange_rows_for_tp(x, {4, 4}, {4, 4});
    },
    [](auto& x) { return nn::bwd_allreduce_for_tp(x); },
    [](auto& x) { return nn::narrow_for_tp(x, 0); },
    [](auto& x) { return nn::merge_for_tp(x, 0); },
    [&](auto& x) { return nn::layer_norm_for_tp(x, 1, {}, {}, 1e-5); },
    [&](auto& x) { return nn::cross_entropy_for_tp(x, weight[0], labels, 8); },
    [&](auto& x) {
      return nn::linears_for_tp(x, nn::entry::gather, weight, none).at(0);
    },
    [&](auto& x) {
      return nn::reduced_linears_for_tp(x, weight, none, 1).at(0);
    }};
  for (size_t i = 0; i < all.size(); ++i) {
    CAPTURE(i);
    auto again = [&](bool records) {
      std::vector<std::string> said(2);
      thread_group{2}.on_all([&](uint64_t rank) {
        auto x = torch::ones({8, 4}, torch::kDouble).requires_grad_();
        auto y = all[i](x).square().sum();
        said[rank] = error_of(
          [&] { torch::autograd::grad({y}, {x}, {}, std::nullopt, records); });
      });
      CHECK(said[0] == said[1]);
      return said[0];
    };
    CHECK(again(false) == "no error");
    CHECK_THAT(again(true), ContainsSubstring("which ranks compute together: "
                                              "create_graph (higher "
                                              "derivatives)"));
  }
}
