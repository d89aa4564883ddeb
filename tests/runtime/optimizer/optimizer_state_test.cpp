#include "tests/support/catch.hpp"

#include "runtime/optimizer/optimizer_state.hpp"
#include "tests/support/error_of.hpp"

#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

using namespace smp;
using Catch::Matchers::ContainsSubstring;
namespace optim = torch::optim;

namespace {

using torch::Tensor;
using optimizer_ptr = std::unique_ptr<optim::Optimizer>;
using maker = optimizer_ptr (*)(std::vector<Tensor>);

struct kind_of_optimizer {
  const char* type;
  maker make;
  size_t fields;
};

const std::vector<kind_of_optimizer> kinds{
  {"SGD",
   [](std::vector<Tensor> xs) -> optimizer_ptr {
     return std::make_unique<optim::SGD>(
       xs, optim::SGDOptions(0.1).momentum(0.9).nesterov(true));
   },
   1},
  {"Adam",
   [](std::vector<Tensor> xs) -> optimizer_ptr {
     return std::make_unique<optim::Adam>(
       xs, optim::AdamOptions(0.1).betas({0.8, 0.95}).weight_decay(0.1));
   },
   3},
  {"AdamW",
   [](std::vector<Tensor> xs) -> optimizer_ptr {
     return std::make_unique<optim::AdamW>(
       xs, optim::AdamWOptions(0.1).amsgrad(true));
   },
   4},
  {"Adagrad",
   [](std::vector<Tensor> xs) -> optimizer_ptr {
     return std::make_unique<optim::Adagrad>(
       xs, optim::AdagradOptions(0.1).lr_decay(0.5));
   },
   2},
  {"RMSprop",
   [](std::vector<Tensor> xs) -> optimizer_ptr {
     return std::make_unique<optim::RMSprop>(
       xs, optim::RMSpropOptions(0.1).momentum(0.9).centered(true));
   },
   4},
};

/// A gradient for step `i`.
void step(optim::Optimizer& x, Tensor& parameter, int i) {
  parameter.mutable_grad() = torch::sin(torch::arange(6.0) * (i + 1));
  x.step();
}

Tensor parameter() {
  return torch::linspace(-1, 1, 6).requires_grad_();
}

} // namespace

TEST_CASE("an optimizer that gets the state of another goes on like it",
          "[runtime][optimizer]") {
  for (auto& [type, make, fields] : kinds) {
    INFO(type);
    auto a = parameter();
    auto first = make({a});
    CHECK(type_of(*first) == type);
    for (int i = 0; i < 3; ++i)
      step(*first, a, i);
    auto b = a.detach().clone().requires_grad_();
    auto second = make({b});
    auto state = state_of(*first, a);
    CHECK(state.size() == fields);
    named_tensors copies;
    for (auto& [name, x] : state)
      copies.emplace_back(name, x.clone());
    set_state(*second, b, copies);
    for (int i = 3; i < 6; ++i) {
      step(*first, a, i);
      step(*second, b, i);
    }
    CHECK(a.equal(b));
    auto known = state_fields(*first);
    for (auto& [name, x] : state) {
      auto i = std::ranges::find(known, name, &state_field::name);
      REQUIRE(i != known.end());
      CHECK(x.sizes().equals(i->is_count ? at::IntArrayRef{} : a.sizes()));
    }
  }
}

TEST_CASE("what an optimizer never updated has no state, and can get none",
          "[runtime][optimizer]") {
  for (auto& [type, make, fields] : kinds) {
    INFO(type);
    auto a = parameter();
    auto fresh = make({a});
    if (std::string{type} == "Adagrad") // makes its sums at once
      continue;
    CHECK(state_of(*fresh, a).empty());
    auto expected = a.detach().clone().requires_grad_();
    auto never = make({expected});
    step(*fresh, a, 1);
    set_state(*fresh, a, {});
    CHECK(state_of(*fresh, a).empty());
    at::NoGradGuard no_grad;
    a.copy_(expected);
    step(*fresh, a, 2);
    step(*never, expected, 2);
    CHECK(a.equal(expected));
  }
}

TEST_CASE("options of a group go to that of another optimizer",
          "[runtime][optimizer]") {
  for (auto& [type, make, fields] : kinds) {
    INFO(type);
    auto a = parameter();
    auto x = make({a});
    auto& group = x->param_groups().front();
    group.options().set_lr(0.123);
    auto saved = options_of(*x, group.options());
    CHECK(saved.at("lr") == 0.123);
    auto other = make({a});
    auto& its = other->param_groups().front().options();
    auto zeros = saved;
    for (auto& [name, value] : zeros)
      value = 0;
    set_options(*other, its, zeros);
    CHECK(options_of(*other, its) == zeros);
    set_options(*other, its, saved);
    CHECK(options_of(*other, its) == saved);
  }
}

TEST_CASE("an optimizer whose state belongs to no parameter is refused",
          "[runtime][optimizer]") {
  optim::LBFGS x{{parameter()}};
  CHECK_THAT(test::error_of([&] { type_of(x); }, error_code::unsupported),
             ContainsSubstring("checkpoints know SGD, Adam"));
}
