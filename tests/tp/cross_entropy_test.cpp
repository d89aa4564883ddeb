#include "tests/support/catch.hpp"

#include "runtime/base/autocast.hpp"
#include "tests/support/torch/near.hpp"
#include "tests/support/torch/thread_group.hpp"
#include "tp/cross_entropy.hpp"

#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/functional/loss.h>

#include <ATen/record_function.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <optional>
#include <string>
#include <vector>

using namespace smp;
using namespace smp::test;
using Catch::Matchers::ContainsSubstring;
using torch::Tensor;

namespace {

namespace F = torch::nn::functional;

constexpr int64_t width = 12;

struct job {
  uint64_t peers = 2;
  bool same = false;
  int64_t vocabulary = 10;
  bool bias = false;
  torch::Dtype type = torch::kDouble;
  cross_entropy_options options = {};
  int64_t samples = 8;
  int64_t tokens = 5;
  bool casts = false; // peers compute in autocast
};

struct outcome {
  Tensor losses;    // [peers], or [1] if all have the same
  Tensor of_hidden; // of all samples
  Tensor of_weight; // of all words
  Tensor of_bias;   // of all words; undefined if there is none
};

Tensor hidden_of(const job& x) {
  torch::manual_seed(3);
  return torch::randn({x.samples, x.tokens, width}).to(x.type);
}

Tensor weight_of(const job& x) {
  torch::manual_seed(4);
  return torch::randn({x.vocabulary, width}).to(x.type);
}

/// @returns undefined if there is none
Tensor bias_of(const job& x) {
  torch::manual_seed(6);
  return x.bias ? torch::randn({x.vocabulary}).to(x.type) : Tensor{};
}

/// A new leaf; undefined of an undefined one.
Tensor leaf(const Tensor& x) {
  return x.defined() ? x.detach().clone().requires_grad_() : x;
}

Tensor grad_of(const Tensor& x) {
  return x.defined() ? x.grad() : x;
}

/// Some of them do not count, of other peers more.
Tensor labels_of(const job& x) {
  torch::manual_seed(5);
  auto result = torch::randint(x.vocabulary, {x.samples, x.tokens},
                               torch::kLong);
  result[0].fill_(x.options.ignore_index);
  result[x.samples - 1][0] = x.options.ignore_index;
  return result;
}

/// The sum over peers of their losses, times 1, 2, ...
outcome alone(const job& x) {
  auto n = static_cast<int64_t>(x.same ? 1 : x.peers);
  auto h = hidden_of(x).requires_grad_();
  auto w = weight_of(x).requires_grad_();
  auto b = leaf(bias_of(x));
  auto hs = h.chunk(n), labels = labels_of(x).chunk(n);
  std::vector<Tensor> losses;
  Tensor all = torch::zeros({}, torch::kDouble);
  for (size_t i = 0; i < hs.size(); ++i) {
    auto logits = torch::linear(hs[i], w, b).flatten(0, 1);
    auto options = F::CrossEntropyFuncOptions().ignore_index(
      x.options.ignore_index);
    if (x.options.mean)
      options.reduction(torch::kMean);
    else
      options.reduction(torch::kSum);
    auto type = x.type == torch::kDouble ? torch::kDouble : torch::kFloat;
    losses.push_back(
      F::cross_entropy(logits.to(type), labels[i].flatten(), options));
    all = all + losses.back() * static_cast<double>(i + 1);
  }
  all.backward();
  return {torch::stack(losses).detach(), h.grad(), w.grad(), grad_of(b)};
}

outcome together(const job& x) {
  auto n = static_cast<int64_t>(x.peers);
  auto part = [&](const Tensor& t, uint64_t i) {
    return x.same ? t : t.chunk(n).at(i);
  };
  const auto hidden = hidden_of(x), weight = weight_of(x),
             labels = labels_of(x), bias = bias_of(x);
  std::vector<Tensor> losses(x.peers), of_hidden(x.peers), of_weight(x.peers),
    of_bias(x.peers);
  thread_group group{x.peers, x.same};
  group.on_all([&](uint64_t i) {
    auto h = part(hidden, i).detach().clone().requires_grad_();
    auto [first, rows] = rows_of_peer(x.vocabulary, static_cast<int64_t>(i), n);
    auto w = weight.narrow(0, first, rows).clone().requires_grad_();
    auto b = leaf(x.bias ? bias.narrow(0, first, rows) : bias);
    std::optional<autocast> scope;
    if (x.casts)
      scope.emplace(torch::kBFloat16);
    auto loss = smp::nn::cross_entropy_for_tp(h, w, part(labels, i),
                                              x.vocabulary, x.options, b);
    scope.reset();
    (loss * static_cast<double>(x.same ? 1 : i + 1)).backward();
    losses[i] = loss.detach();
    of_hidden[i] = h.grad();
    of_weight[i] = w.grad();
    of_bias[i] = grad_of(b);
  });
  if (x.same)
    for (uint64_t i = 1; i < x.peers; ++i) {
      CHECK(losses[i].equal(losses[0]));
      CHECK(of_hidden[i].equal(of_hidden[0]));
    }
  return {x.same ? losses[0].unsqueeze(0) : torch::stack(losses),
          x.same ? of_hidden[0] : torch::cat(of_hidden), torch::cat(of_weight),
          x.bias ? torch::cat(of_bias) : Tensor{}};
}

void compare(job x, double share) {
  x.options.counts_samples_once = true;
  CAPTURE(x.peers, x.same, x.vocabulary, x.bias, x.options.mean, x.type);
  auto mine = together(x), expected = alone(x);
  CHECK(mine.losses.scalar_type() == expected.losses.scalar_type());
  CHECK(mine.of_hidden.scalar_type() == expected.of_hidden.scalar_type());
  CHECK(mine.of_weight.scalar_type() == expected.of_weight.scalar_type());
  check_near(mine.losses, expected.losses, share);
  check_near(mine.of_hidden, expected.of_hidden, share);
  check_near(mine.of_weight, expected.of_weight, share);
  REQUIRE(mine.of_bias.defined() == x.bias);
  if (!x.bias)
    return;
  CHECK(mine.of_bias.scalar_type() == expected.of_bias.scalar_type());
  check_near(mine.of_bias, expected.of_bias, share);
}

} // namespace

TEST_CASE("a loss over words of all peers is that of one process",
          "[tp][cross_entropy][R59]") {
  job x;
  x.peers = GENERATE(1, 2, 4);
  x.same = GENERATE(false, true);
  x.vocabulary = GENERATE(8, 11, 3); // 3: a peer may have no word
  x.bias = GENERATE(false, true);
  x.options.mean = GENERATE(true, false);
  x.options.ignore_index = GENERATE(-100, 2);
  compare(x, 1e-11);
}

TEST_CASE("a weight of one's own counts the samples of each peer",
          "[tp][cross_entropy][R58]") {
  job x;
  x.same = x.bias = true;
  auto mine = together(x), expected = alone(x);
  check_near(mine.losses, expected.losses, 1e-11);
  check_near(mine.of_hidden, expected.of_hidden, 1e-11);
  check_near(mine.of_weight, 2 * expected.of_weight, 1e-11);
  check_near(mine.of_bias, 2 * expected.of_bias, 1e-11);
}

TEST_CASE("a loss over words of all peers has the digits of its type",
          "[tp][cross_entropy][R59]") {
  job x;
  x.same = GENERATE(false, true);
  x.bias = GENERATE(false, true);
  x.vocabulary = 101;
  x.samples = 64;
  x.type = torch::kFloat;
  compare(x, 1e-5);
  x.type = torch::kBFloat16;
  compare(x, 4e-2);
}

TEST_CASE("autocast leaves a loss in float64 as it is", "[tp][cross_entropy]") {
  job x;
  x.same = GENERATE(false, true);
  x.casts = true;
  compare(x, 1e-11);
}

TEST_CASE("logits far from 0 cost a loss no digits",
          "[tp][cross_entropy][R59]") {
  thread_group group{2};
  std::vector<double> found(2);
  group.on_all([&](uint64_t i) {
    // Logits 10000, 9999 on one rank, 0 and -10000 on the other.
    auto h = torch::ones({1, 1});
    auto w = i == 0 ? torch::tensor({{10000.0f}, {9999.0f}})
                    : torch::tensor({{0.0f}, {-10000.0f}});
    auto label = torch::full({1}, static_cast<int64_t>(2 * i), torch::kLong);
    found[i] = smp::nn::cross_entropy_for_tp(h, w, label, 4).item<double>();
  });
  CHECK(found[0] == Catch::Approx(std::log1p(std::exp(-1.0))));
  CHECK(found[1] == Catch::Approx(10000 + std::log1p(std::exp(-1.0))));
}

TEST_CASE("no rank has more logits than those of its words and samples",
          "[tp][cross_entropy][R59]") {
  constexpr int64_t words = 1000;
  std::atomic<int64_t> most = 0;
  static std::atomic<int64_t>* largest = nullptr;
  largest = &most;
  auto handle = at::addGlobalCallback(
    at::RecordFunctionCallback(
      nullptr,
      [](const at::RecordFunction& f, at::ObserverContext*) {
        for (auto& y : f.outputs())
          if (y.isTensor() && y.toTensor().defined())
            *largest = std::max(largest->load(), y.toTensor().numel());
      })
      .needsOutputs(true)
      .scopes({at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION}));
  auto same = GENERATE(false, true);
  constexpr int64_t peers = 4, samples = 16; // of each peer
  thread_group group{peers, same};
  std::vector<Tensor> hs, ws, bs, labels;
  for (int64_t i = 0; i < peers; ++i) {
    torch::manual_seed(1);
    hs.push_back(torch::randn({samples, 8}).requires_grad_());
    ws.push_back(torch::randn({words / peers, 8}).requires_grad_());
    bs.push_back(torch::randn({words / peers}).requires_grad_());
    labels.push_back(torch::randint(words, {samples}, torch::kLong));
  }
  most = 0;
  group.on_all([&](uint64_t i) {
    cross_entropy_options options{.counts_samples_once = true};
    smp::nn::cross_entropy_for_tp(hs[i], ws[i], labels[i], words, options,
                                  bs[i])
      .backward();
  });
  at::removeCallback(handle);
  CHECK(most >= samples * words / peers);
  CHECK(most <= samples * words / peers);
}

TEST_CASE("labels and weights that do not fit a loss are refused by name",
          "[tp][cross_entropy]") {
  thread_group group{1};
  auto h = torch::ones({4, 3});
  auto w = torch::ones({5, 3});
  auto told = [&](Tensor hidden, Tensor weight, Tensor labels,
                  Tensor bias = {}) {
    std::string result;
    try {
      group.on_all([&](uint64_t) {
        smp::nn::cross_entropy_for_tp(hidden, weight, labels, 5, {}, bias);
      });
    } catch (const std::exception& e) {
      result = e.what();
    }
    return result;
  };
  auto labels = torch::zeros({4}, torch::kLong);
  CHECK(told(h, w, labels) == "");
  CHECK_THAT(told(h, w, labels + 5), ContainsSubstring("there are 5 words"));
  CHECK_THAT(told(h, w.narrow(0, 0, 4), labels),
             ContainsSubstring("of 5 words this rank has 5, but the weight is "
                               "[4, 3]"));
  CHECK_THAT(told(h, w, labels, torch::ones({4})),
             ContainsSubstring("of 5 words this rank has 5, but the bias is "
                               "[4]"));
  CHECK_THAT(told(h, torch::ones({5, 2}), labels),
             ContainsSubstring("hidden states [4, 3] for a weight [5, 2]"));
  CHECK_THAT(told(h, w, torch::zeros({3}, torch::kLong)),
             ContainsSubstring("labels [3] for hidden states [4, 3]"));
}

TEST_CASE("logits are there for who wants them", "[tp][cross_entropy]") {
  auto same = GENERATE(false, true);
  job x;
  x.vocabulary = 11;
  x.peers = 4;
  x.bias = true;
  thread_group group{x.peers, same};
  const auto hidden = hidden_of(x), weight = weight_of(x), bias = bias_of(x);
  std::vector<Tensor> found(x.peers);
  auto part = [&](uint64_t i) { return same ? hidden : hidden.chunk(4).at(i); };
  group.on_all([&](uint64_t i) {
    auto [first, rows] = rows_of_peer(11, static_cast<int64_t>(i), 4);
    found[i] = smp::nn::logits_for_tp(part(i), weight.narrow(0, first, rows),
                                      11, {}, bias.narrow(0, first, rows));
  });
  for (uint64_t i = 0; i < x.peers; ++i)
    check_near(found[i], torch::linear(part(i), weight, bias), 1e-12);
}
