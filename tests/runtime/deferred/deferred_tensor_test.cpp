#include "tests/support/catch.hpp"

#include "tests/support/torch/deferred.hpp"
#include "tests/support/torch/two_ranks.hpp"

#include <torch/torch.h>

#include <map>
#include <sstream>
#include <string>
#include <vector>

// What may be done with tensors whose bytes do not exist yet.

using namespace smp;
using namespace smp::test;

namespace nn = torch::nn;

// -- values inside of the scope -----------------------------------------------

TEST_CASE("code in the scope may read values", "[runtime][delay]") {
  torch::NoGradGuard no_grad;
  check_custom(
    "branches",
    [](custom_impl& m) {
      auto a = m.parameter("a", torch::randn({2000}));
      if (a.sum().item<float>() > 0)
        a.mul_(2);
      else
        a.mul_(3);
      if (a[7].lt(0).item<bool>())
        a[7] = 0;
      auto largest = a.argmax().item<int64_t>();
      a[largest].zero_();
      m.parameter("b", torch::randn({2000})).normal_();
      m.parameter("c", a.masked_select(a > 0));
    },
    2);
  check_custom("values that ordinary tensors take", [](custom_impl& m) {
    auto a = m.parameter("a", torch::randn({40, 50}));
    auto b = m.parameter("b", torch::zeros({50}));
    b.copy_(a.mean(0));
    b += a[3];
    m.buffer("c", a.nonzero().flatten().slice(0, 0, 20).clone());
  });
  // What was only read is not kept.
  delay_param_initialization scope;
  auto x = torch::randn({2000});
  auto largest = x.max().item<float>();
  CHECK(is_deferred(x));
  std::ostringstream out;
  out << x.slice(0, 0, 3);
  CHECK(is_deferred(x));
  CHECK(x.slice(0, 0, 3).allclose(x.slice(0, 0, 3).clone()));
  initialise_deferred({x});
  CHECK(x.max().item<float>() == largest);
}

TEST_CASE("a pointer to the data in the scope makes the tensor at once",
          "[runtime][delay]") {
  torch::NoGradGuard no_grad;
  check_custom(
    "writes through a pointer",
    [](custom_impl& m) {
      auto a = m.parameter("a", torch::randn({2000}));
      auto view = a.view({40, 50});
      a.data_ptr<float>()[3] = 7;
      view.accessor<float, 2>()[2][1] = 8;
      m.parameter("b", a.clone()).mul_(view.view({-1}));
      a.mul_(2); // `b` has what it was before
    },
    0);
  torch::manual_seed(4);
  auto expected = torch::randn({2000});
  torch::manual_seed(4);
  delay_param_initialization scope;
  auto a = torch::randn({2000});
  auto view = a.view({40, 50});
  REQUIRE(is_deferred(a));
  auto* data = a.data_ptr<float>();
  CHECK_FALSE(is_deferred(a));
  CHECK_FALSE(is_deferred(view));
  CHECK(view.data_ptr<float>() == data);
  CHECK(same_bits(a, expected));
}

TEST_CASE("what was copied in counts as it was then", "[runtime][delay]") {
  torch::NoGradGuard no_grad;
  auto outside = torch::arange(2000).to(torch::kFloat);
  auto* data = outside.data_ptr<float>();
  Tensor a, b;
  {
    delay_param_initialization scope;
    a = torch::empty({2000});
    a.copy_(outside);
    outside.mul_(2);
    b = torch::empty({2000});
    b.copy_(outside);
    data[1] = -1;
  }
  CHECK(is_deferred(a));
  CHECK(a[1].item<float>() == 1);
  CHECK(b[1].item<float>() == 2);
  CHECK(a[1999].item<float>() == 1999);
}

TEST_CASE("an inner scope can switch the delay off", "[runtime][delay]") {
  delay_param_initialization outer;
  CHECK(is_deferred(torch::zeros({2000})));
  {
    delay_param_initialization inner{false};
    CHECK_FALSE(is_deferred(torch::zeros({2000})));
    {
      delay_param_initialization again;
      CHECK(is_deferred(torch::zeros({2000})));
    }
    CHECK_FALSE(is_deferred(torch::zeros({2000})));
  }
  CHECK(is_deferred(torch::zeros({2000})));
}

TEST_CASE("errors in the scope are those of LibTorch", "[runtime][delay]") {
  using Catch::Matchers::ContainsSubstring;
  delay_param_initialization scope;
  nn::Linear x{64, 64};
  CHECK_THROWS_WITH(x->weight.mul_(2), ContainsSubstring("leaf Variable"));
  CHECK_THROWS_WITH(x->weight.add(torch::zeros({63})),
                    ContainsSubstring("must match the size"));
  torch::NoGradGuard no_grad;
  CHECK_THROWS_WITH(x->weight.view({-1, 3}), ContainsSubstring("invalid"));
}

// -- without a partition ------------------------------------------------------

TEST_CASE("a deferred model trains without smp as an ordinary one does",
          "[runtime][delay]") {
  auto run = [](bool delay) {
    torch::manual_seed(9);
    nn::Sequential model;
    {
      delay_param_initialization scope{delay};
      model = nn::Sequential{nn::Linear(64, 64), nn::BatchNorm1d(64),
                             nn::GELU(), nn::Linear(64, 64)};
    }
    torch::optim::AdamW adamw{model->parameters(), 1e-2};
    std::vector<Tensor> result;
    for (int i = 0; i < 3; ++i) {
      adamw.zero_grad();
      auto x = torch::randn({8, 64});
      auto loss = (model->forward(x) - x).pow(2).mean();
      loss.backward();
      adamw.step();
      result.push_back(loss.detach().view({1}));
    }
    for (auto& x : model->parameters())
      result.push_back(x.detach().flatten());
    return torch::cat(result);
  };
  CHECK(same_bits(run(true), run(false)));
}

TEST_CASE("backward through what was computed in the scope is refused",
          "[runtime][delay]") {
  Tensor w, scaled;
  {
    delay_param_initialization scope;
    w = torch::ones({2000}).requires_grad_();
    scaled = w * 2;
  }
  CHECK(is_deferred(scaled));
  CHECK(scaled.requires_grad());
  auto loss = scaled.sum();
  CHECK(loss.item<float>() == 4000);
  CHECK_THROWS_WITH(loss.backward(),
                    Catch::Matchers::ContainsSubstring(
                      "compute it in forward, or under torch::NoGradGuard"));
}

TEST_CASE("captured programs as long as a large model's end without recursion",
          "[runtime][delay]") {
  torch::NoGradGuard no_grad;
  delay_param_initialization scope;
  auto x = torch::zeros({2000});
  constexpr int n = 200'000;
  for (int i = 0; i < n; ++i)
    x.add_(1);
  CHECK(is_deferred(x));
  auto y = x.clone();
  x.reset();
  y.reset();
}

// -- over ranks ---------------------------------------------------------------

namespace {

struct tower_impl : nn::Module {
  tower_impl() {
    register_module("in", in);
    register_module("body", body);
    register_module("out", out);
    register_buffer("scale", scale);
    register_parameter("tied", in->weight);
    torch::NoGradGuard no_grad;
    apply([](nn::Module& m) {
      if (auto* x = m.as<nn::Linear>())
        x->weight.normal_(0, 0.2);
    });
    in->weight[0].zero_();
  }

  Tensor forward(Tensor x) {
    return out(body->forward(in(x))) * scale.mean();
  }

  submodule<nn::Linear> in{64, 64};
  nn::Sequential body{nn::Linear(64, 64), nn::GELU(), nn::Linear(64, 64),
                      nn::BatchNorm1d(64), nn::Linear(64, 64)};
  submodule<nn::Linear> out{64, 64};
  Tensor scale = torch::rand({64, 64});
};
TORCH_MODULE_IMPL(tower, tower_impl);

struct tower_result {
  std::vector<Tensor> losses;
  std::map<std::string, Tensor> before, after;
};

tower_result train_tower(uint64_t ranks, bool delay) {
  tower_result result;
  virtual_world_options world;
  world.config.pipeline_parallel_degree = ranks;
  world.config.microbatches = 2;
  world.config.threads = 1;
  run_virtual_world(ranks, world, [&](session& s) {
    auto made = seeded([&] {
      delay_param_initialization scope{delay};
      return tower{};
    });
    size_t deferred = 0;
    for (auto& x : made->parameters())
      deferred += is_deferred(x);
    distributed_model model{made};
    torch::optim::AdamW adamw{model->parameters(), 1e-2};
    distributed_optimizer optimizer{adamw};
    auto train_step = step([&](Tensor x) {
      auto loss = (model(x) - x).pow(2).mean();
      model.backward(loss);
      return loss;
    });
    auto before = (model.partition(), model.state_dict());
    std::vector<Tensor> losses;
    for (int i = 0; i < 3; ++i) {
      optimizer.zero_grad();
      auto x = torch::arange(8 * 64).view({8, 64}).mul(7 + i).remainder(13)
               / 13;
      losses.push_back(train_step(x).reduce_mean());
      clip_grad_norm_(model, 1.0);
      optimizer.step();
    }
    auto after = model.state_dict();
    size_t left = 0;
    for (auto& x : made->parameters())
      left += is_deferred(x);
    if (left > 0 || (delay && deferred < 5))
      throw std::runtime_error{std::to_string(deferred) + " were deferred, "
                               + std::to_string(left) + " still are"};
    if (s.rank() == 0) {
      result.losses = losses;
      result.before = {before.begin(), before.end()};
      result.after = {after.begin(), after.end()};
    }
  });
  return result;
}

} // namespace

TEST_CASE("deferred and ordinary models train alike on 1, 2 and 4 ranks",
          "[runtime][delay]") {
  auto ranks = GENERATE(1u, 2u, 4u);
  CAPTURE(ranks);
  auto expected = train_tower(ranks, false);
  auto result = train_tower(ranks, true);
  REQUIRE(result.losses.size() == 3);
  for (size_t i = 0; i < 3; ++i)
    CHECK(same_bits(result.losses[i], expected.losses[i]));
  REQUIRE(result.before.size() == expected.before.size());
  for (auto& [name, x] : expected.before) {
    INFO(name);
    CHECK(same_bits(result.before.at(name), x));
    CHECK(same_bits(result.after.at(name), expected.after.at(name)));
  }
}

TEST_CASE("a rank makes only what it owns", "[runtime][delay]") {
  run_virtual_world(2, manual_world(), [](session& s) {
    nn::Linear near{nullptr}, far{nullptr};
    auto made = seeded([&] {
      delay_param_initialization scope;
      return caller{[](function_impl&, Tensor x) { return x; },
                    [](caller_impl& m, Tensor x) { return m.there(x); }};
    });
    // Small ones are ordinary, so give it large ones.
    Tensor here, there;
    {
      delay_param_initialization scope;
      here = made->register_parameter("large", torch::ones({5000}));
      there = made->there->register_parameter("large", torch::ones({5000}));
    }
    distributed_model model{made};
    model.partition();
    auto& mine = s.rank() == 0 ? here : there;
    auto& other = s.rank() == 0 ? there : here;
    if (is_deferred(mine) || is_deferred(other) || mine.storage().nbytes() == 0
        || other.storage().nbytes() != 0)
      throw std::runtime_error{"rank " + std::to_string(s.rank())
                               + " has other bytes than those that it owns"};
  });
}

TEST_CASE("values loaded before the partition stay", "[runtime][delay]") {
  run_virtual_world(2, manual_world(), [](session&) {
    auto made = seeded([&] {
      delay_param_initialization scope;
      auto x = caller{[](function_impl&, Tensor x) { return x; },
                      [](caller_impl& m, Tensor x) { return m.there(x); }};
      x->register_parameter("large", torch::randn({5000}));
      x->there->register_parameter("large", torch::randn({5000}));
      return x;
    });
    distributed_model model{made};
    named_tensors values;
    for (auto& [name, x] : tensors_of(*made))
      values.emplace_back(name, torch::full(x.sizes(), name.size()));
    model.load_state_dict(values);
    model.partition();
    for (auto& [name, x] : model.state_dict())
      if (!x.eq(static_cast<int64_t>(name.size())).all().item<bool>())
        throw std::runtime_error{name + " has another value"};
  });
}
