#include "tests/support/catch.hpp"

#include "runtime/optimizer/fused_update.hpp"

#include <ATen/record_function.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>

#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

// Updates in one pass against those of LibTorch's optimizers.

using namespace smp;
using torch::Tensor;

namespace {

using parameters = std::vector<Tensor>;
using optimizer_ptr = std::unique_ptr<torch::optim::Optimizer>;
using maker = std::function<optimizer_ptr(const parameters&)>;

const std::map<std::string, maker> makers = {
  {"adam with weight decay and amsgrad",
   [](const parameters& x) -> optimizer_ptr {
     return std::make_unique<torch::optim::Adam>(
       x, torch::optim::AdamOptions(0.01).weight_decay(0.1).amsgrad(true));
   }},
  {"adamw",
   [](const parameters& x) -> optimizer_ptr {
     return std::make_unique<torch::optim::AdamW>(
       x, torch::optim::AdamWOptions(0.01).weight_decay(0.1));
   }},
  {"sgd with momentum",
   [](const parameters& x) -> optimizer_ptr {
     return std::make_unique<torch::optim::SGD>(
       x, torch::optim::SGDOptions(0.1).momentum(0.9).weight_decay(0.01));
   }},
  {"sgd with nesterov",
   [](const parameters& x) -> optimizer_ptr {
     return std::make_unique<torch::optim::SGD>(
       x, torch::optim::SGDOptions(0.1).momentum(0.9).nesterov(true));
   }},
  {"sgd",
   [](const parameters& x) -> optimizer_ptr {
     return std::make_unique<torch::optim::SGD>(x,
                                                torch::optim::SGDOptions(0.1));
   }},
  {"sgd with weight decay",
   [](const parameters& x) -> optimizer_ptr {
     return std::make_unique<torch::optim::SGD>(
       x, torch::optim::SGDOptions(0.1).weight_decay(0.1));
   }},
  {"adagrad",
   [](const parameters& x) -> optimizer_ptr {
     return std::make_unique<torch::optim::Adagrad>(
       x, torch::optim::AdagradOptions(0.1).weight_decay(0.01).lr_decay(0.1));
   }},
};

/// Of two types, one without an axis, and one that has no gradient at first.
parameters make_parameters() {
  torch::manual_seed(3);
  auto type = [](at::ScalarType x) { return torch::TensorOptions{x}; };
  parameters result{torch::randn({300, 70}), torch::randn({70}),
                    torch::randn({}), torch::randn({5, 5}),
                    torch::randn({40, 3}, type(torch::kDouble))};
  for (auto& x : result)
    x.set_requires_grad(true);
  return result;
}

void set_gradients(parameters& xs, int64_t step) {
  torch::manual_seed(100 + step);
  for (size_t i = 0; i < xs.size(); ++i) {
    auto g = torch::randn_like(xs[i].detach()) * 0.1;
    xs[i].mutable_grad() = i == 3 && step < 2 ? Tensor{} : g;
  }
}

void check_last_places(const Tensor& mine, const Tensor& expected) {
  auto most = expected.abs().max().item<double>();
  CHECK((mine - expected).abs().max().item<double>() <= 1e-6 * most + 1e-9);
}

} // namespace

TEST_CASE("an update in one pass differs in the last places only",
          "[runtime][fused_update][R35]") {
  for (auto& [name, make] : makers) {
    CAPTURE(name);
    auto mine = make_parameters();
    auto expected = make_parameters();
    auto fused = make(mine);
    auto plain = make(expected);
    for (int64_t i = 0; i < 5; ++i) {
      set_gradients(mine, i);
      set_gradients(expected, i);
      update_fused(*fused);
      plain->step();
      for (size_t k = 0; k < mine.size(); ++k)
        check_last_places(mine[k].detach(), expected[k].detach());
    }
    // Either goes on from what the other remembers.
    CHECK(fused->state().size() == plain->state().size());
    set_gradients(mine, 5);
    set_gradients(expected, 5);
    fused->step();
    update_fused(*plain);
    for (size_t k = 0; k < mine.size(); ++k)
      check_last_places(mine[k].detach(), expected[k].detach());
  }
}

TEST_CASE("an update in one pass is one kernel, where there is one",
          "[runtime][fused_update]") {
  static std::set<std::string> seen;
  auto note = [](const at::RecordFunction& x) {
    seen.insert(x.name());
    return std::unique_ptr<at::ObserverContext>{};
  };
  for (auto& [name, kernel] : std::map<std::string, std::string>{
         {"adam with weight decay and amsgrad", "aten::_fused_adam_"},
         {"adamw", "aten::_fused_adamw_"},
         {"sgd with momentum", "aten::_fused_sgd_"},
         {"sgd with weight decay", "aten::_fused_sgd_"},
         {"adagrad", "aten::_fused_adagrad_"}}) {
    CAPTURE(name);
    parameters xs{torch::ones({4, 3}).set_requires_grad(true),
                  torch::ones({4, 3}, torch::kDouble).set_requires_grad(true)};
    auto optimizer = makers.at(name)(xs);
    for (auto& x : xs)
      x.mutable_grad() = torch::ones_like(x.detach());
    seen.clear();
    auto handle = at::addThreadLocalCallback(at::RecordFunctionCallback(note));
    update_fused(*optimizer);
    at::removeCallback(handle);
    CHECK(seen.contains(kernel));
    CHECK_FALSE(seen.contains("aten::mul_"));
    CHECK_FALSE(seen.contains("aten::add_"));
  }
}

TEST_CASE("gradients that no kernel takes are used the plain way",
          "[runtime][fused_update]") {
  parameters xs{torch::ones({4, 3}).set_requires_grad(true)};
  torch::optim::SGD sgd{xs, torch::optim::SGDOptions(0.5)};
  xs[0].mutable_grad() = torch::sparse_coo_tensor(torch::tensor({{2}}),
                                                  torch::ones({1, 3}), {4, 3});
  update_fused(sgd);
  auto expected = torch::ones({4, 3});
  expected[2].fill_(0.5);
  CHECK(torch::equal(xs[0].detach(), expected));
  // A column, whose elements do not lie next to each other.
  auto wide = torch::ones({4, 3});
  parameters columns{wide.narrow(1, 0, 1).detach().set_requires_grad(true)};
  torch::optim::AdamW adamw{columns, torch::optim::AdamWOptions(0.5)};
  columns[0].mutable_grad() = torch::ones({4, 1});
  update_fused(adamw);
  CHECK(wide.narrow(1, 0, 1).lt(0.6).all().item<bool>());
  CHECK(wide.narrow(1, 1, 2).eq(1).all().item<bool>());
}
