#include "tests/support/catch.hpp"

#include "runtime/intercept/call_scope.hpp"
#include "runtime/intercept/sequential.hpp"
#include "runtime/model/hook.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/torch/training_step.hpp"
#include "tests/support/torch/two_ranks.hpp"

#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

// A Sequential that grows after `distributed_model`, before and after the
// partition.

using namespace smp;
using namespace smp::test;

namespace {

/// Notes whose calls it hears of.
class noting final : public call_interceptor {
public:
  noting() {
    set_interceptor(interceptor::order, this);
  }

  ~noting() override {
    set_interceptor(interceptor::order, nullptr);
  }

  void enter(const intercepted_call& x) override {
    heard.push_back(x.module.value().value);
  }

  std::vector<uint64_t> heard;
};

struct chain_impl : torch::nn::Module {
  chain_impl() {
    body->push_back(
      function{[](function_impl& self, Tensor x) { return x * self.weight; }});
    register_module("body", body);
  }

  Tensor forward(Tensor x) {
    return body->forward(x);
  }

  torch::nn::Sequential body;
};
TORCH_MODULE_IMPL(chain, chain_impl);

struct linear_chain_impl : torch::nn::Module {
  linear_chain_impl() {
    register_module("net", net);
  }

  Tensor forward(Tensor x) {
    return net->forward(x);
  }

  torch::nn::Sequential net{torch::nn::Linear(2, 2)};
};
TORCH_MODULE_IMPL(linear_chain, linear_chain_impl);

} // namespace

TEST_CASE("children that came later are intercepted as the first ones",
          "[runtime][intercept]") {
  torch::nn::Linear first{2, 3};
  torch::nn::Linear second{3, 1};
  torch::nn::Sequential body;
  body->push_back(first);
  auto before = intercept_children(*body);
  REQUIRE(before.size() == 1);
  before[0]->id = module_id{1};
  body->push_back(second);
  auto after = intercept_children(*body);
  REQUIRE(after.size() == 2);
  // Who walked the model before may still look there.
  CHECK(after[0] == before[0]);
  after[1]->id = module_id{2};
  CHECK(intercept_children(*body) == after);
  auto x = torch::ones({4, 2});
  noting calls;
  auto y = body->forward(x);
  CHECK(calls.heard == std::vector<uint64_t>{1, 2});
  CHECK(torch::equal(y, second(first(x))));
}

TEST_CASE("a child that came after the model was taken runs at its owner",
          "[runtime][intercept]") {
  std::mutex mutex;
  std::set<uint64_t> ran; // by rank
  std::map<std::string, Tensor> gradients;
  run_virtual_world(2, manual_world(), [&](session& s) {
    chain made;
    distributed_model model{made};
    function late{[&](function_impl& self, Tensor x) {
      std::lock_guard guard{mutex};
      ran.insert(session::current().rank());
      return x * self.weight;
    }};
    made->body->push_back(late);
    set_partition(*late, 1);
    auto train_step = training_step(model, sum_of);
    train_step(torch::ones({2, 3})).reduce_mean();
    auto all = model.gradients();
    if (s.rank() == 0)
      gradients = {all.begin(), all.end()};
  });
  CHECK(ran == std::set<uint64_t>{1});
  REQUIRE(gradients.size() == 2);
  for (auto& [name, x] : gradients)
    CHECK(torch::equal(x, torch::full({3}, 2.0)));
}

TEST_CASE("a child that is pushed into a partitioned model is refused by name",
          "[runtime][intercept]") {
  run_virtual_world(2, manual_world(), [](session& s) {
    distributed_model model{seeded([] { return linear_chain{}; })};
    auto train_step = training_step(model, sum_of);
    train_step(torch::ones({1, 2}));
    model->net->push_back(torch::nn::Linear(2, 2));
    auto told = error_of(
      [&] {
        train_step(torch::ones({1, 2}));
      },
      error_code::unsupported);
    if (told.find("'net.1' was pushed into its Sequential") == told.npos)
      throw std::runtime_error{"rank " + std::to_string(s.rank()) + ": "
                               + told};
  });
}
