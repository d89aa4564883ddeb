#include "tests/support/catch.hpp"

#include "tests/support/torch_thread_group.hpp"
#include "tp/distributed_module.hpp"

#include <ATen/ops/embedding.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/functional/linear.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

using namespace smp;
using namespace smp::test;
using torch::Tensor;

namespace {

struct shared_module {
  std::map<std::string, tensor_slice> slices;
  native_module mine;
  std::unique_ptr<distributed_module> module;
};

/// What peer `rank` makes of a module: leaves that hold the slices.
shared_module share(const native_module& x, uint64_t rank, uint64_t peers) {
  auto* how = find_distribution(x.type);
  REQUIRE(how != nullptr);
  shared_module result{
    how->slices(x, static_cast<int64_t>(rank), static_cast<int64_t>(peers)),
    x,
    {}};
  for (auto& [name, t] : result.mine.parameters)
    t = result.slices.at(name).of(t).detach().clone().requires_grad_();
  result.module = how->make(result.mine);
  return result;
}

struct numbers {
  Tensor output;
  Tensor input_grad; // undefined for indices
  std::map<std::string, Tensor> grads;
};

/// Forward and backward of all samples by torch alone.
template <class F>
numbers alone(const native_module& x, Tensor input, const Tensor& seed, F f) {
  numbers result;
  auto leaves = x.parameters;
  for (auto& [name, t] : leaves)
    t = t.detach().clone().requires_grad_();
  if (input.is_floating_point())
    input = input.detach().clone().requires_grad_();
  auto y = f(input, leaves);
  y.backward(seed);
  result.output = y.detach();
  result.input_grad = input.grad();
  for (auto& [name, t] : leaves)
    result.grads[name] = t.grad().to_dense();
  return result;
}

/// The same shared by peers, each with its part of the samples.
numbers together(const native_module& x, const Tensor& input,
                 const Tensor& seed, uint64_t peers) {
  auto n = static_cast<int64_t>(peers);
  auto inputs = input.chunk(n, 0);
  auto seeds = seed.chunk(n, 0);
  std::vector<shared_module> modules;
  for (uint64_t i = 0; i < peers; ++i)
    modules.push_back(share(x, i, peers));
  std::vector<Tensor> outputs(peers), input_grads(peers);
  thread_group group{peers};
  group.on_all([&](uint64_t i) {
    auto mine = inputs[i].detach().clone();
    if (mine.is_floating_point())
      mine.requires_grad_();
    auto y = modules[i].module->forward(mine);
    y.backward(seeds[i]);
    outputs[i] = y.detach();
    input_grads[i] = mine.grad();
  });
  numbers result;
  result.output = torch::cat(outputs, 0);
  if (input.is_floating_point())
    result.input_grad = torch::cat(input_grads, 0);
  for (auto& [name, whole] : x.parameters) {
    auto sum = torch::zeros_like(whole);
    for (auto& m : modules)
      if (auto g = m.mine.parameters.at(name).grad(); g.defined())
        m.slices.at(name).of(sum) += g.to_dense();
    result.grads[name] = sum;
  }
  return result;
}

void check_equal(const numbers& a, const numbers& b, double relative) {
  auto near = [&](const Tensor& x, const Tensor& y) {
    REQUIRE(x.sizes() == y.sizes());
    CHECK(x.scalar_type() == y.scalar_type());
    auto off = (x - y).abs().max().item<double>();
    CHECK(off <= relative * y.abs().max().item<double>() + 1e-7);
  };
  near(a.output, b.output);
  if (b.input_grad.defined())
    near(a.input_grad, b.input_grad);
  for (auto& [name, t] : b.grads) {
    INFO(name);
    near(a.grads.at(name), t);
  }
}

double digits_of(torch::Dtype x) {
  return x == torch::kDouble ? 1e-12 : x == torch::kFloat ? 1e-5 : 3e-2;
}

} // namespace

TEST_CASE("Linear computes the same shared as alone", "[tp][linear]") {
  uint64_t peers = GENERATE(1, 2, 4);
  auto dtype = GENERATE(torch::kFloat, torch::kDouble, torch::kBFloat16);
  auto with_bias = GENERATE(true, false);
  auto sizes = GENERATE(std::vector<int64_t>{8, 12},
                        std::vector<int64_t>{4, 3, 12},
                        std::vector<int64_t>{4, 1, 5, 12});
  CAPTURE(peers, dtype, with_bias, sizes);
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
  check_equal(together(x, input, seed, peers), alone(x, input, seed, plain),
              digits_of(dtype));
}

TEST_CASE("Embedding computes the same shared as alone", "[tp][embedding]") {
  uint64_t peers = GENERATE(1, 2, 4);
  auto dtype = GENERATE(torch::kFloat, torch::kDouble, torch::kBFloat16);
  auto sparse = GENERATE(false, true);
  auto padding = GENERATE(std::optional<int64_t>{}, std::optional<int64_t>{3});
  CAPTURE(peers, dtype, sparse, padding.has_value());
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
  check_equal(together(x, input, seed, peers), alone(x, input, seed, plain),
              digits_of(dtype));
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
        == "its 10 input channels cannot be divided among 4 ranks");
  native_module table{"Embedding"};
  table.parameters["weight"] = torch::zeros({10, 6});
  CHECK(refusal(table, 3).empty());
  CHECK(refusal(table, 4) == "its 6 channels cannot be divided among 4 ranks");
  table.max_norm = true;
  CHECK(refusal(table, 3).find("max_norm") == 0);
  CHECK(find_distribution("Conv2d") == nullptr);
}
