#include "tests/support/catch.hpp"

#include "tests/support/torch_two_ranks.hpp"

#include <torch/nn/modules/linear.h>
#include <torch/utils.h>

#include <string>

using namespace smp;
using namespace smp::test;

namespace {

struct pair_impl : torch::nn::Module {
  pair_impl() {
    register_module("a", a);
    register_module("b", b);
    register_module("c", c);
    register_buffer("scale", torch::ones({}));
  }

  submodule<torch::nn::Linear> a{8, 8}, b{8, 4}, c{4, 1};
};
TORCH_MODULE_IMPL(pair, pair_impl);

/// Fails the rank, and so the test: Catch2's macros are for its own thread.
void require(bool x, const std::string& what) {
  if (!x)
    throw std::runtime_error{"not true: " + what};
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

/// Loads `wrong` on two ranks, and checks that nothing changed.
/// @returns the error
std::string refusal_of(distributed_model<pair>& model,
                       const named_tensors& wrong) {
  auto before = model.state_dict();
  std::string told = "no error";
  try {
    model.load_state_dict(wrong);
  } catch (const error& err) {
    require(err.code() == error_code::config, "the code");
    told = err.what();
  }
  auto after = model.state_dict();
  for (size_t i = 0; i < before.size(); ++i)
    require(torch::equal(before[i].second, after[i].second), before[i].first);
  return told;
}

template <class F>
void with_model(F f) {
  run_virtual_world(2, manual_world(), [&](session&) {
    auto made = seeded([] { return pair{}; });
    set_partition(*made->b, 1);
    distributed_model model{made};
    model.partition();
    f(model);
  });
}

} // namespace

TEST_CASE("a wrong state dict is refused as a whole, with all that is wrong",
          "[runtime][state]") {
  with_model([](auto& model) {
    auto wrong = model.state_dict();
    for (auto& [name, x] : wrong)
      x.zero_();
    wrong[1].first = "a.wieght";
    wrong[2].second = torch::ones({8, 1});
    wrong[3].second = torch::empty({4, 8}, torch::kMeta);
    wrong[4].second = Tensor{};
    wrong.erase(wrong.begin() + 5);
    auto told = refusal_of(model, wrong);
    require(told
              == "load_state_dict: 2 missing ('a.weight', 'c.weight'), 1 not "
                 "in the model ('a.wieght'), 1 of another shape ('a.bias': "
                 "[8, 1] instead of [8]), 2 undefined, meta, sparse or "
                 "quantised ('b.weight', 'b.bias'); nothing was loaded",
            told);
  });
}

TEST_CASE("the error about a state dict has an end", "[runtime][state]") {
  with_model([](auto& model) {
    named_tensors wrong;
    for (int i = 0; i < 5000; ++i)
      wrong.emplace_back(std::string(500, 'x') + std::to_string(i),
                         torch::ones({1}));
    auto told = refusal_of(model, wrong);
    require(contains(told, "7 missing ('scale', ")
              && contains(told, "5000 not in the model")
              && contains(told, " and 4992 more)"),
            told);
    require(told.size() < 2000, "length");
  });
}

TEST_CASE("a state dict in any order is loaded", "[runtime][state]") {
  with_model([](auto& model) {
    auto xs = model.state_dict();
    for (auto& [name, x] : xs)
      x.fill_(static_cast<int64_t>(name.size()));
    model.load_state_dict({xs.rbegin(), xs.rend()});
    for (auto& [name, x] : model.state_dict())
      require(
        x.eq(static_cast<int64_t>(name.size())).all().template item<bool>(),
        name);
  });
}
