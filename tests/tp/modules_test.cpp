#include "tests/support/catch.hpp"

#include "tests/support/error_of.hpp"
#include "tests/support/torch/peers.hpp"
#include "tp/lm_head.hpp"
#include "tp/module_options.hpp"

#include <ATen/autocast_mode.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/layer_norm.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/functional/linear.h>

#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

using namespace smp;
using namespace smp::test;
using torch::Tensor;

TEST_CASE("Linear computes the same shared as alone", "[tp][linear]") {
  uint64_t peers = GENERATE(1, 2, 4);
  auto same = GENERATE(false, true);
  auto dtype = GENERATE(torch::kFloat, torch::kDouble, torch::kBFloat16);
  auto with_bias = GENERATE(true, false);
  auto sizes = GENERATE(std::vector<int64_t>{8, 12},
                        std::vector<int64_t>{4, 3, 12},
                        std::vector<int64_t>{4, 1, 5, 12});
  CAPTURE(peers, same, dtype, with_bias, sizes);
  torch::manual_seed(5);
  auto type = GENERATE(std::string{"Linear"}, std::string{"Conv1D"});
  CAPTURE(type);
  native_module x{type};
  auto weight = torch::randn({7, 12}).to(dtype);
  x.parameters["weight"] = type == "Linear" ? weight : weight.t().contiguous();
  if (with_bias)
    x.parameters["bias"] = torch::randn({7}).to(dtype);
  auto input = torch::randn(sizes).to(dtype);
  auto out = sizes;
  out.back() = 7;
  auto seed = torch::randn(out).to(dtype);
  auto plain = [&](const Tensor& y, auto& leaves) {
    auto w = leaves.at("weight");
    return torch::nn::functional::linear(y, type == "Linear" ? w : w.t(),
                                         with_bias ? leaves.at("bias")
                                                   : Tensor{});
  };
  check_equal(together(x, input, seed, peers, {}, same),
              alone(x, input, seed, plain), digits_of(dtype));
}

TEST_CASE("what a shared Linear gives may be changed in place",
          "[tp][linear]") {
  auto same = GENERATE(false, true);
  CAPTURE(same);
  torch::manual_seed(5);
  native_module x{"Linear"};
  x.parameters["weight"] = torch::randn({7, 12}, torch::kDouble);
  auto input = torch::randn({4, 12}, torch::kDouble);
  auto weight = x.parameters["weight"].detach().clone().requires_grad_();
  auto expected = torch::nn::functional::linear(input, weight).relu();
  expected.sum().backward();
  std::vector<shared_module> modules;
  for (uint64_t i = 0; i < 2; ++i)
    modules.push_back(share(x, i, 2));
  std::vector<Tensor> found(2);
  thread_group group{2, same};
  group.on_all([&](uint64_t i) {
    std::vector<Tensor> mine{same ? input : input.chunk(2, 0).at(i)};
    auto y = modules[i].module->forward(mine).at(0);
    y.relu_().sum().backward();
    found[i] = y.detach();
  });
  auto all = same ? same_of_all(found) : torch::cat(found);
  CHECK(torch::allclose(all, expected.detach()));
  for (size_t i = 0; i < 2; ++i)
    CHECK(torch::allclose(modules[i].mine.parameters.at("weight").grad(),
                          weight.grad().chunk(2, 1).at(i)));
}

TEST_CASE("a shared Linear takes one sample without an axis for samples",
          "[tp][linear]") {
  int64_t peers = GENERATE(2, 4);
  auto same = GENERATE(false, true);
  auto type = GENERATE(std::string{"Linear"}, std::string{"Conv1D"});
  CAPTURE(peers, same, type);
  torch::manual_seed(5);
  native_module x{type};
  auto weight = torch::randn({7, 12});
  x.parameters["weight"] = type == "Linear" ? weight : weight.t().contiguous();
  x.parameters["bias"] = torch::randn({7});
  auto n = same ? 1 : peers;
  auto inputs = torch::randn({n, 12}), seeds = torch::randn({n, 7});
  std::vector<shared_module> modules;
  for (int64_t i = 0; i < peers; ++i)
    modules.push_back(
      share(x, static_cast<uint64_t>(i), static_cast<uint64_t>(peers)));
  std::vector<Tensor> outputs(modules.size()), of_inputs(modules.size());
  thread_group group{modules.size(), same};
  group.on_all([&](uint64_t i) {
    auto row = same ? 0 : static_cast<int64_t>(i);
    auto mine = inputs[row].clone().requires_grad_();
    auto y = modules[i].module->forward({&mine, 1}).at(0);
    y.backward(seeds[row]);
    outputs[i] = y.detach();
    of_inputs[i] = mine.grad();
  });
  auto rows_of = [&](const std::vector<Tensor>& xs) {
    return same ? same_of_all(xs).unsqueeze(0) : torch::stack(xs);
  };
  numbers_of_module found{rows_of(outputs), rows_of(of_inputs), {}};
  for (auto& [name, slice] : modules[0].slices) {
    std::vector<Tensor> parts;
    for (auto& m : modules)
      parts.push_back(m.mine.parameters.at(name).grad());
    found.grads[name] = slice.merged(parts);
  }
  auto plain = [&](const Tensor& y, auto& leaves) {
    auto w = leaves.at("weight");
    return torch::nn::functional::linear(y, type == "Linear" ? w : w.t(),
                                         leaves.at("bias"));
  };
  check_equal(found, alone(x, inputs, seeds, plain), 1e-5);
}

TEST_CASE("Embedding computes the same shared as alone", "[tp][embedding]") {
  uint64_t peers = GENERATE(1, 2, 4);
  auto same = GENERATE(false, true);
  auto dtype = GENERATE(torch::kFloat, torch::kDouble, torch::kBFloat16);
  auto sparse = GENERATE(false, true);
  auto padding = GENERATE(std::optional<int64_t>{}, std::optional<int64_t>{3});
  CAPTURE(peers, same, dtype, sparse, padding.has_value());
  torch::manual_seed(6);
  native_module x{"Embedding"};
  x.parameters["weight"] = torch::randn({20, 8}).to(dtype);
  x.sparse = sparse;
  x.padding_idx = padding;
  auto input = torch::randint(20, {8, 5}, torch::kLong);
  auto seed = torch::randn({8, 5, 8}).to(dtype);
  auto plain = [&](const Tensor& y, auto& leaves) {
    return at::embedding(leaves.at("weight"), y, padding.value_or(-1), false,
                         sparse);
  };
  check_equal(together(x, input, seed, peers, {}, same),
              alone(x, input, seed, plain), digits_of(dtype));
}

TEST_CASE("a shared Embedding limits norms and counts as each peer's does",
          "[tp][embedding]") {
  uint64_t peers = GENERATE(1, 2, 4);
  auto same = GENERATE(false, true);
  auto dtype = GENERATE(torch::kFloat, torch::kDouble);
  int64_t channels = GENERATE(8, 3); // 3: by rows
  auto norm_type = GENERATE(2.0, 1.0, std::numeric_limits<double>::infinity());
  auto padding = GENERATE(std::optional<int64_t>{}, std::optional<int64_t>{3});
  CAPTURE(peers, same, dtype, channels, norm_type, padding.has_value());
  torch::manual_seed(6);
  native_module x{"Embedding"};
  x.parameters["weight"] = torch::randn({20, channels}).to(dtype);
  x.max_norm = norm_type == 1 ? 3.0 : 1.0;
  x.norm_type = norm_type;
  x.scale_grad_by_freq = true;
  x.padding_idx = padding;
  auto input = torch::randint(20, {8, 5}, torch::kLong);
  auto seed = torch::randn({8, 5, channels}).to(dtype);
  auto plain = [&](const Tensor& y, auto& leaves) {
    auto table = leaves.at("weight");
    {
      torch::NoGradGuard no_grad;
      torch::embedding_renorm_(table, y, *x.max_norm, norm_type);
    }
    std::vector<Tensor> found;
    for (auto& part : y.chunk(same ? 1 : static_cast<int64_t>(peers)))
      found.push_back(
        at::embedding(table, part, padding.value_or(-1), true, false));
    return torch::cat(found);
  };
  auto expected = alone(x, input, seed, plain);
  auto whole = at::embedding(x.parameters["weight"], input);
  REQUIRE((whole - expected.output).abs().max().item<double>() > 0.1);
  check_equal(together(x, input, seed, peers, {}, same), expected,
              digits_of(dtype));
}

TEST_CASE("LayerNorm computes the same shared as alone", "[tp][layer_norm]") {
  uint64_t peers = GENERATE(1, 2, 4);
  auto same = GENERATE(false, true);
  auto dtype = GENERATE(torch::kFloat, torch::kDouble, torch::kBFloat16);
  auto affine = GENERATE(0, 1, 2); // neither, weight, both
  auto sizes = GENERATE(std::vector<int64_t>{8, 12},
                        std::vector<int64_t>{4, 3, 12},
                        std::vector<int64_t>{4, 2, 5, 12});
  std::vector<int64_t> shape{12};
  if (sizes.size() == 4)
    shape = {5, 12};
  CAPTURE(peers, same, dtype, affine, sizes);
  torch::manual_seed(8);
  native_module x{"LayerNorm"};
  x.normalized_shape = shape;
  x.eps = 1e-3;
  if (affine > 0)
    x.parameters["weight"] = torch::randn(shape).to(dtype);
  if (affine > 1)
    x.parameters["bias"] = torch::randn(shape).to(dtype);
  auto input = (torch::randn(sizes) * 2 + 3).to(dtype);
  auto seed = torch::randn(sizes).to(dtype);
  auto plain = [&](const Tensor& y, auto& leaves) {
    auto of = [&](const char* name) {
      return leaves.contains(name) ? leaves.at(name) : Tensor{};
    };
    return at::layer_norm(y, shape, of("weight"), of("bias"), 1e-3);
  };
  check_equal(together(x, input, seed, peers, {}, same),
              alone(x, input, seed, plain),
              dtype == torch::kFloat ? 3e-5 : digits_of(dtype));
}

TEST_CASE("a shared LayerNorm has the type that autocast gives a plain one",
          "[tp][layer_norm]") {
  auto dtype = GENERATE(torch::kFloat, torch::kBFloat16);
  CAPTURE(dtype);
  native_module x{"LayerNorm"};
  x.normalized_shape = {12};
  x.parameters["weight"] = torch::randn({12});
  x.parameters["bias"] = torch::randn({12});
  auto input = torch::randn({8, 12}).to(dtype);
  namespace ac = at::autocast;
  auto under_autocast = [](auto f) {
    ac::set_autocast_dtype(torch::kCPU, torch::kBFloat16);
    ac::set_autocast_enabled(torch::kCPU, true);
    auto result = f();
    ac::set_autocast_enabled(torch::kCPU, false);
    return result;
  };
  auto expected = under_autocast([&] {
    return at::layer_norm(input, {12}, x.parameters["weight"],
                          x.parameters["bias"], 1e-5);
  });
  std::vector<shared_module> modules;
  for (uint64_t i = 0; i < 2; ++i)
    modules.push_back(share(x, i, 2));
  std::vector<Tensor> outputs(2);
  thread_group{2}.on_all([&](uint64_t i) {
    std::vector<Tensor> part{input.chunk(2)[i]};
    outputs[i] = under_autocast(
      [&] { return modules[i].module->forward(part).at(0); });
  });
  for (auto& y : outputs)
    CHECK(y.scalar_type() == expected.scalar_type());
  auto off = (torch::cat(outputs) - expected).abs().max().item<double>();
  CHECK(off <= digits_of(dtype) * expected.abs().max().item<double>());
}

// In float32 half of the digits of these numbers are those of the mean.
TEST_CASE("a mean far from 0 costs a shared LayerNorm no digits",
          "[tp][layer_norm]") {
  uint64_t peers = GENERATE(2, 4);
  auto same = GENERATE(false, true);
  torch::manual_seed(9);
  native_module x{"LayerNorm"};
  x.normalized_shape = {1024};
  x.parameters["weight"] = torch::randn({1024});
  // Exact in float32: the digits that count are there.
  auto input = (torch::randn({8, 1024}) * 64).round() / 16 + 4096 * 3;
  auto seed = torch::randn({8, 1024});
  auto exact = x;
  exact.parameters["weight"] = x.parameters["weight"].to(torch::kDouble);
  auto plain = [&](const Tensor& y, auto& leaves) {
    return at::layer_norm(y, {1024}, leaves.at("weight"), {}, 1e-5);
  };
  auto expected = alone(exact, input.to(torch::kDouble),
                        seed.to(torch::kDouble), plain);
  auto mine = together(x, input, seed, peers, {}, same);
  auto off = [](const Tensor& a, const Tensor& b) {
    return ((a.to(torch::kDouble) - b).abs().max() / b.abs().max())
      .item<double>();
  };
  CHECK(off(mine.output, expected.output) < 2e-6);
  CHECK(off(mine.input_grad, expected.input_grad) < 2e-6);
  CHECK(off(mine.grads.at("weight"), expected.grads.at("weight")) < 2e-6);
}

TEST_CASE("a table of fewer channels than can be divided is cut by rows",
          "[tp][embedding]") {
  uint64_t peers = GENERATE(2, 4);
  auto same = GENERATE(false, true);
  auto dtype = GENERATE(torch::kFloat, torch::kDouble, torch::kBFloat16);
  auto sparse = GENERATE(false, true);
  auto padding = GENERATE(std::optional<int64_t>{}, std::optional<int64_t>{13});
  CAPTURE(peers, same, dtype, sparse, padding.has_value());
  torch::manual_seed(6);
  native_module x{"Embedding"};
  // 21 rows: one more on some
  x.parameters["weight"] = torch::randn({21, 3}).to(dtype);
  x.sparse = sparse;
  x.padding_idx = padding;
  auto* how = find_distribution("Embedding");
  CHECK(how->manner(x, static_cast<int64_t>(peers)) == std::string{"by rows"});
  auto input = torch::randint(21, {8, 5}, torch::kLong);
  input[0][0] = 13;
  auto seed = torch::randn({8, 5, 3}).to(dtype);
  auto plain = [&](const Tensor& y, auto& leaves) {
    return at::embedding(leaves.at("weight"), y, padding.value_or(-1), false,
                         sparse);
  };
  check_equal(together(x, input, seed, peers, {}, same),
              alone(x, input, seed, plain), digits_of(dtype));
  CHECK_THROWS_WITH(together(x, input + 10, seed, peers),
                    Catch::Matchers::ContainsSubstring("21 rows"));
}

TEST_CASE("a sparse gradient has the rows that were looked up, and no others",
          "[tp][embedding]") {
  native_module x{"Embedding"};
  x.parameters["weight"] = torch::randn({10, 1});
  x.sparse = true;
  std::vector<shared_module> modules;
  for (uint64_t i = 0; i < 2; ++i)
    modules.push_back(share(x, i, 2));
  thread_group group{2};
  auto input = torch::tensor({0, 7, 7, 2}, torch::kLong).view({2, 2});
  group.on_all([&](uint64_t i) {
    auto mine = input.slice(0, static_cast<int64_t>(i), i + 1);
    modules[i].module->forward({&mine, 1}).at(0).sum().backward();
  });
  auto rows = [&](size_t i) {
    auto g = modules[i].mine.parameters.at("weight").grad();
    REQUIRE(g.is_sparse());
    return g.coalesce().indices().flatten();
  };
  CHECK(torch::equal(rows(0), torch::tensor({0, 2}, torch::kLong)));
  CHECK(torch::equal(rows(1), torch::tensor({2}, torch::kLong))); // 7 - 5
}

TEST_CASE("a peer holds its slice only, of a bias all or nothing",
          "[tp][linear][embedding]") {
  native_module x{"Linear"};
  x.parameters["weight"] = torch::zeros({6, 8});
  x.parameters["bias"] = torch::zeros({6});
  for (uint64_t i = 0; i < 4; ++i) {
    auto mine = share(x, i, 4);
    CHECK((mine.mine.parameters.at("weight").sizes() == at::IntArrayRef{6, 2}));
    CHECK(mine.mine.parameters.at("bias").numel() == (i == 0 ? 6 : 0));
  }
}

TEST_CASE("what cannot be shared says why", "[tp][linear][embedding]") {
  native_module linear{"Linear"};
  linear.parameters["weight"] = torch::zeros({6, 10});
  auto refusal = [](const native_module& x, int64_t peers) {
    return find_distribution(x.type)->refusal(x, peers);
  };
  CHECK(refusal(linear, 2).empty());
  CHECK(refusal(linear, 4)
        == "its 10 input channels cannot be divided among 4 ranks; 8 or 12 "
           "could");
  linear.parameters["weight"] = torch::zeros({6, 3});
  CHECK(refusal(linear, 4)
        == "its 3 input channels cannot be divided among 4 ranks; 4 could");
  native_module table{"Embedding"};
  table.parameters["weight"] = torch::zeros({10, 6});
  CHECK(refusal(table, 3).empty());
  CHECK(refusal(table, 4).empty()); // by rows
  table.parameters["weight"] = torch::zeros({3, 6});
  CHECK(refusal(table, 4)
        == "its 6 channels cannot be divided among 4 ranks; 4 or 8 could, and "
           "so could 4 rows or more");
  native_module norm{"LayerNorm"};
  norm.normalized_shape = {3, 10};
  CHECK(refusal(norm, 2).empty());
  CHECK(refusal(norm, 4)
        == "its 10 channels cannot be divided among 4 ranks; 8 or 12 could");
  CHECK(find_distribution("Conv2d") == nullptr);
  // Of nothing no rank gets anything.
  linear.parameters["weight"] = torch::zeros({6, 0});
  CHECK(refusal(linear, 4)
        == "its 0 input channels cannot be divided among 4 ranks; 4 could");
  table.parameters["weight"] = torch::zeros({8, 0});
  CHECK(refusal(table, 4).starts_with("its 0 channels cannot be divided"));
  norm.normalized_shape = {3, 0};
  CHECK(refusal(norm, 4)
        == "its 0 channels cannot be divided among 4 ranks; 4 could");
}

TEST_CASE("what is shared as a module of one tensor takes one",
          "[tp][linear][embedding]") {
  auto check = [](native_module x) {
    INFO(x.type);
    x.name = "part";
    auto& how = *find_distribution(x.type);
    auto shared = how.make(x, how.slices(x, 0, 2));
    std::vector<Tensor> two(2, torch::zeros({2, 8}));
    CHECK(cause_of([&] { shared->forward(two); }, error_code::user_code)
          == "'part' is shared as a module of one tensor, but got 2: give "
             "smp::tp_register a forward_hook that makes one of them, or do "
             "not share it");
  };
  native_module x{"Linear"};
  x.parameters["weight"] = torch::zeros({8, 8});
  check(x);
  x.type = "Conv1D";
  check(x);
  x.type = "Embedding";
  check(x);
  x.by_words = true; // by rows
  check(x);
  x.type = "LayerNorm";
  x.parameters["weight"] = torch::zeros({8});
  x.normalized_shape = {8};
  check(x);
}

TEST_CASE("the last layer of a language model takes one tensor or two",
          "[tp][lm_head]") {
  auto x = described(lm_head_options{});
  x.name = "head";
  x.parameters["weight"] = torch::zeros({4, 2});
  auto& how = smp::nn::lm_head_distribution;
  auto head = how.make(x, how.slices(x, 0, 2));
  CHECK(cause_of([&] { head->forward({}); }, error_code::user_code)
        == "'head' expects hidden states, or these and labels, not 0 tensors");
  std::vector<Tensor> three(3, torch::zeros({1, 2}));
  CHECK(cause_of([&] { head->forward(three); }, error_code::user_code)
        == "'head' expects hidden states, or these and labels, not 3 tensors");
}
