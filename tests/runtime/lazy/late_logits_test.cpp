#include "tests/support/catch.hpp"

#include "runtime/base/autocast.hpp"
#include "runtime/lazy/late_logits.hpp"
#include "runtime/lazy/promise.hpp"
#include "tests/support/error_of.hpp"

#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/functional/loss.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

// Late logits alone, without ranks: code that gets them must see what it would
// see of the logits themselves, which are computed only if something reads
// them (R64).

using namespace smp;
using namespace smp::test;
using torch::Tensor;

namespace {

namespace F = torch::nn::functional;
namespace ag = torch::autograd;

constexpr int64_t samples = 3, tokens = 4, width = 5, words = 7;

struct counted_source : logits_source {
  counted_source(Tensor h, Tensor w)
    : hidden(std::move(h)), weight(std::move(w)) {
    // nop
  }

  Tensor logits() override {
    ++made_logits;
    return at::linear(hidden, weight);
  }

  Tensor cross_entropy(const Tensor& rows, const Tensor& labels,
                       int64_t ignored, bool mean) override {
    ++losses;
    auto h = hidden.flatten(0, -2);
    if (rows.defined())
      h = h.index_select(0, rows);
    return at::cross_entropy_loss(
      at::linear(h, weight).to(hidden.scalar_type()), labels, {},
      mean ? at::Reduction::Mean : at::Reduction::Sum, ignored);
  }

  Tensor hidden, weight;
  int made_logits = 0, losses = 0;
};

/// Leaves, and logits of them, ordinary or late.
struct head {
  explicit head(bool late) {
    torch::manual_seed(1);
    auto f64 = torch::dtype(torch::kDouble).requires_grad(true);
    hidden = torch::randn({samples, tokens, width}, f64);
    weight = torch::randn({words, width}, f64);
    if (!late) {
      logits = at::linear(hidden, weight);
      return;
    }
    source = std::make_shared<counted_source>(hidden, weight);
    logits = make_late_logits(
      source,
      torch::empty({samples, tokens, words},
                   torch::dtype(torch::kDouble).device(torch::kMeta)),
      at::GradMode::is_enabled()
        ? std::optional{ag::impl::gradient_edge(hidden)}
        : std::nullopt);
  }

  Tensor hidden, weight, logits;
  std::shared_ptr<counted_source> source;
};

Tensor labels() {
  auto result = torch::arange(samples * tokens).remainder(words);
  return result.index_fill(0, torch::tensor({5}), -100).view({samples, tokens});
}

using program = std::function<Tensor(Tensor)>;

/// @returns the result; its gradients are in the leaves
Tensor run(const program& f, const head& x) {
  auto result = f(x.logits);
  if (result.requires_grad())
    (result.dim() == 0 ? result : result.square().sum()).backward();
  return result.detach();
}

/// Runs `f` on ordinary and on late logits and compares result and gradients.
/// @returns how often the logits were made
int compare(const program& f) {
  head plain{false}, late{true};
  auto expected = run(f, plain), found = run(f, late);
  CHECK(torch::allclose(expected, found, 1e-12, 1e-12, true));
  auto same = [](const Tensor& x, const Tensor& y) {
    return x.defined() == y.defined()
           && (!x.defined() || torch::allclose(x, y, 1e-12, 1e-12, true));
  };
  CHECK(same(plain.hidden.grad(), late.hidden.grad()));
  CHECK(same(plain.weight.grad(), late.weight.grad()));
  return late.source->made_logits;
}

/// @param made how often each of them makes the logits
void check_each(const std::vector<program>& programs, int made) {
  for (size_t i = 0; i < programs.size(); ++i) {
    CAPTURE(i);
    CHECK(compare(programs[i]) == made);
  }
}

Tensor loss(const Tensor& x, const Tensor& y) {
  return F::cross_entropy(x, y);
}

struct squared : ag::Function<squared> {
  static Tensor forward(ag::AutogradContext* c, const Tensor& x) {
    c->save_for_backward({x});
    return x * x;
  }

  static ag::variable_list backward(ag::AutogradContext* c,
                                    const ag::variable_list& grads) {
    return {2 * grads[0] * c->get_saved_variables()[0]};
  }
};

/// Reads nothing before its backward.
struct unread : ag::Function<unread> {
  static Tensor forward(ag::AutogradContext*, const Tensor& x) {
    return torch::zeros(x.sizes(), torch::kDouble);
  }

  static ag::variable_list backward(ag::AutogradContext*,
                                    const ag::variable_list& grads) {
    return {grads[0]};
  }
};

/// @param which a kind of selection, below 7 @param dim an axis of `x`
Tensor selected(const Tensor& x, uint64_t which, int64_t dim) {
  switch (which) {
    case 0:
      return x.reshape({-1, x.size(-1)});
    case 1:
      return x.transpose(0, -1);
    case 2:
      return x.size(dim) > 1 ? x.slice(dim, 0, -1) : x;
    case 3:
      return x.contiguous();
    case 4:
      return x.clone();
    case 5:
      return x.unsqueeze(0).squeeze(0);
    default:
      return x.flatten(0, 1);
  }
}

/// A random program: selections, reads, changes and losses of what it has.
Tensor run_random(uint64_t seed, const Tensor& logits) {
  std::mt19937_64 random{seed};
  std::vector<Tensor> known{logits};
  auto total = torch::zeros({}, torch::kDouble);
  auto has_loss = false;
  for (int i = 0; i < 8; ++i) {
    auto x = known[random() % known.size()];
    auto dim = static_cast<int64_t>(random() % 3) % x.dim();
    auto what = random() % (seed % 3 == 0 ? 8 : 14);
    if (what < 7) {
      known.push_back(selected(x, what, dim));
      continue;
    }
    switch (what) {
      case 8:
        known.push_back(x.mul_(1.5));
        break;
      case 9:
        known.push_back(x.to(torch::kFloat).to(torch::kDouble));
        break;
      case 10:
        x.select(0, 0).mul_(0.5);
        break;
      case 11:
        total = total + x.log_softmax(-1).square().mean();
        break;
      case 12:
        total = total + squared::apply(x).mean();
        break;
      case 13:
        if (x.requires_grad() && !has_loss) // hooks come before losses
          x.register_hook([](const Tensor& g) { return 1.5 * g; });
        break;
      default:
        if (x.dim() < 2 || x.size(1) == 0)
          break;
        auto sizes = x.sizes().vec();
        sizes.erase(sizes.begin() + 1);
        auto y = torch::arange(x.numel() / x.size(1))
                   .remainder(x.size(1))
                   .view(sizes);
        total = total + loss(x, y);
        has_loss = true;
    }
  }
  return total;
}

} // namespace

TEST_CASE("a loss of late logits is computed without them",
          "[runtime][lazy][R64]") {
  auto y = labels();
  auto shifted = y.slice(1, 1).contiguous();
  auto programs = std::vector<program>{
    [=](Tensor x) {
      return loss(x.view({-1, words}), y.view(-1));
    },
    [=](Tensor x) { return loss(x.flatten(0, 1), y.flatten()); },
    [=](Tensor x) { return loss(x.transpose(1, 2), y); },
    [=](Tensor x) {
      return loss(x.permute({0, 2, 1}), y);
    },
    [=](Tensor x) {
      return loss(x.to(torch::kDouble).reshape({-1, words}), y.reshape(-1));
    },
    [=](Tensor x) { // as GPT-2 does
      auto before = x.slice(1, 0, -1).slice(2, 0, words).contiguous();
      return loss(before.view({-1, before.size(-1)}), shifted.view(-1));
    },
    [=](Tensor x) { // another order of rows, some of them
      return loss(x.narrow(0, 1, 2).transpose(0, 1).reshape({-1, words}),
                  y.narrow(0, 1, 2).t().reshape(-1));
    },
    [=](Tensor x) { // summed, with another label ignored
      return F::cross_entropy(
        x.view({-1, words}), y.view(-1).clamp_min(0),
        F::CrossEntropyFuncOptions().ignore_index(3).reduction(torch::kSum));
    },
    [=](Tensor x) { // two of them
      auto rows = x.view({-1, words});
      return loss(rows, y.view(-1))
             + 2 * loss(rows.slice(0, 2), y.view(-1).slice(0, 2));
    },
    [=](Tensor x) { // sizes and strides are known
      CHECK(x.is_contiguous());
      CHECK_FALSE(x.slice(1, 1).is_contiguous());
      CHECK(x.slice(1, 1).stride(0) == tokens * words);
      CHECK(x.numel() == samples * tokens * words);
      CHECK(x.requires_grad());
      return loss(x.view({-1, words}), y.view(-1));
    }};
  check_each(programs, 0);
}

TEST_CASE("whatever else reads late logits computes with the logits, once",
          "[runtime][lazy][R64]") {
  auto y = labels();
  auto programs = std::vector<program>{
    [=](Tensor x) { return x.log_softmax(-1); },
    [=](Tensor x) { return x + x.exp(); },
    [=](Tensor x) { return x.argmax(-1); },
    [=](Tensor x) { return x * torch::ones_like(x); }, // reads below autograd
    [=](Tensor x) { return squared::apply(x); },
    [=](Tensor x) {
      return squared::apply(x) + x.view({samples, tokens, -1});
    },
    [=](Tensor x) {
      return torch::cat(
        {x.view({-1, words}), torch::ones({1, words}, torch::kDouble)});
    },
    [=](Tensor x) {
      CHECK(x.data_ptr() != nullptr);
      return loss(x.view({-1, words}), y.view(-1)) + x.sin().sum();
    },
    [=](Tensor x) { // its gradient
      x.retain_grad();
      auto result = loss(x.view({-1, words}), y.view(-1));
      result.backward({}, true);
      return x.grad();
    },
    [=](Tensor x) { // a hook
      x.register_hook([](Tensor g) { return 2 * g; });
      return loss(x.view({-1, words}), y.view(-1)) + x.sin().sum();
    }};
  check_each(programs, 1);
}

TEST_CASE("late logits that change in place are changed for all that read them",
          "[runtime][lazy][R64]") {
  auto y = labels();
  auto programs = std::vector<program>{
    [=](Tensor x) {
      return loss(x.div_(2).view({-1, words}), y.view(-1));
    },
    [=](Tensor x) {
      auto rows = x.view({-1, words});
      x.select(0, 1).mul_(3);
      return loss(rows, y.view(-1));
    },
    [=](Tensor x) { // copied before it changed
      auto copy = x.clone();
      x.mul_(3);
      return loss(copy.view({-1, words}), y.view(-1)) + x.sum();
    },
    // A function takes its place in the graph before it reads.
    [=](Tensor x) {
      x.mul_(3);
      return squared::apply(x);
    },
    [=](Tensor x) {
      x.select(0, 1).mul_(3);
      return squared::apply(x);
    },
    [=](Tensor x) {
      auto rows = x.view({-1, words});
      x.mul_(3);
      return squared::apply(rows);
    },
    [=](Tensor x) {
      auto rows = x.view({-1, words});
      rows.mul_(3);
      return squared::apply(x);
    },
    [=](Tensor x) {
      auto copy = x.clone();
      auto rows = copy.view({-1, words});
      copy.mul_(3);
      return squared::apply(rows) + x.view({-1, words});
    }};
  check_each(programs, 1);
}

TEST_CASE("hooks see the gradient of late logits as they were then",
          "[runtime][lazy][R64]") {
  auto y = labels();
  auto programs = std::vector<program>{
    [=](Tensor x) {
      x.register_hook([](Tensor g) { return 2 * g; });
      x.mul_(3);
      return loss(x.view({-1, words}), y.view(-1)) + x.sin().sum();
    },
    [=](Tensor x) {
      auto rows = x.view({-1, words});
      rows.register_hook([](Tensor g) { return 2 * g; });
      auto before = (2 * rows).sum();
      x.mul_(3);
      return before + rows.exp().sum();
    }};
  check_each(programs, 1);
}

TEST_CASE("a function that kept late logits refuses to use changed ones",
          "[runtime][lazy][R64]") {
  program kept = [](Tensor x) {
    auto result = squared::apply(x);
    x.mul_(3);
    return result;
  };
  for (auto late : {false, true})
    CHECK_THROWS_WITH(run(kept, head{late}), Catch::Matchers::ContainsSubstring(
                                               "modified by an inplace"));
}

TEST_CASE("losses other than the sum or mean of labels' read the logits",
          "[runtime][lazy][R64]") {
  auto y = labels();
  auto programs = std::vector<program>{
    [=](Tensor x) { // of each token's samples, in place of words
      return loss(x, torch::zeros({samples, words}, torch::kLong));
    },
    [=](Tensor x) {
      return F::cross_entropy(
        x.view({-1, words}), y.view(-1),
        F::CrossEntropyFuncOptions().label_smoothing(0.1));
    },
    [=](Tensor x) {
      return F::cross_entropy(
        x.view({-1, words}), y.view(-1),
        F::CrossEntropyFuncOptions().reduction(torch::kNone));
    },
    [=](Tensor x) {
      return loss(x.view({-1, words}),
                  torch::softmax(x.detach(), -1).view({-1, words}));
    }};
  check_each(programs, 1);
}

TEST_CASE("random programs cannot tell late logits from logits",
          "[runtime][lazy][R64]") {
  auto right = 0, without = 0;
  for (uint64_t seed = 0; seed < 1000; ++seed) {
    CAPTURE(seed);
    program f = [seed](const Tensor& x) { return run_random(seed, x); };
    auto raises = false;
    try {
      run(f, head{false});
    } catch (const std::exception&) {
      raises = true; // a view of what has gaps, a change of what is kept
    }
    if (raises) {
      CHECK_THROWS(run(f, head{true}));
      continue;
    }
    ++right;
    without += compare(f) == 0;
  }
  CHECK(right > 500);
  CHECK(without > 20);
}

TEST_CASE("late logits are of the modes in which they were asked for",
          "[runtime][lazy][R64]") {
  auto y = labels().view(-1);
  SECTION("no gradient was wanted") {
    std::optional<head> x;
    {
      torch::NoGradGuard off;
      x.emplace(true);
    }
    CHECK_FALSE(x->logits.requires_grad());
    CHECK_FALSE(loss(x->logits.view({-1, words}), y).requires_grad());
    CHECK_FALSE(x->logits.exp().requires_grad());
  }
  SECTION("they are read where no gradient is wanted") {
    head x{true};
    {
      torch::NoGradGuard off;
      CHECK_FALSE(loss(x.logits.view({-1, words}), y).requires_grad());
      CHECK_FALSE(x.logits.exp().requires_grad());
    }
    x.logits.sum().backward();
    CHECK(x.hidden.grad().defined());
  }
  SECTION("they are read for inference") {
    head x{true};
    {
      c10::InferenceMode on;
      CHECK(x.logits.exp().is_inference());
    }
    CHECK_FALSE(x.logits.is_inference());
    x.logits.sum().backward();
    CHECK(x.hidden.grad().defined());
  }
  SECTION("autocast computes losses in float32") {
    auto hidden = torch::randn({2, 3, width}),
         weight = torch::randn({words, width});
    auto y = torch::arange(6);
    auto narrow = torch::dtype(torch::kBFloat16).device(torch::kMeta);
    auto make = [&] {
      return make_late_logits(std::make_shared<counted_source>(hidden, weight),
                              torch::empty({2, 3, words}, narrow),
                              std::nullopt);
    };
    autocast on{torch::kBFloat16};
    auto plain = at::linear(hidden, weight);
    CHECK(plain.scalar_type() == torch::kBFloat16);
    CHECK(make().scalar_type() == torch::kBFloat16);
    auto found = loss(make().view({-1, words}), y);
    CHECK(found.scalar_type() == torch::kFloat);
    CHECK(torch::allclose(found, loss(plain.view({-1, words}), y), 1e-2));
    CHECK(torch::equal(make().to(torch::kFloat), plain.to(torch::kFloat)));
  }
}

TEST_CASE("a function with a gradient for logits that it never read is refused",
          "[runtime][lazy][R64]") {
  head x{true};
  auto result = unread::apply(x.logits).sum();
  CHECK_THAT(error_of([&] { result.backward(); }),
             Catch::Matchers::ContainsSubstring("did not read in its forward"));
}
