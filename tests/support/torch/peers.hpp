#pragma once

// One module alone, and the same shared by peers that are threads.

#include "tests/support/catch.hpp"

#include "tests/support/torch/thread_group.hpp"
#include "tp/distributions.hpp"

#include <torch/csrc/autograd/autograd.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

namespace smp::test {

struct shared_module {
  parameter_slices slices;
  native_module mine;
  std::unique_ptr<distributed_module> module;
};

/// What peer `rank` makes of a module: leaves that hold the slices.
inline shared_module share(const native_module& x, uint64_t rank,
                           uint64_t peers) {
  auto* how = find_distribution(x.type);
  REQUIRE(how != nullptr);
  auto n = static_cast<int64_t>(peers);
  REQUIRE(how->refusal(x, n) == "");
  shared_module result{how->slices(x, static_cast<int64_t>(rank), n), x, {}};
  for (auto& [name, t] : result.mine.parameters) {
    auto slice = result.slices.find(name);
    auto mine = slice == result.slices.end() ? t : slice->second.of(t);
    t = mine.detach().clone().requires_grad_();
  }
  result.module = how->make(result.mine, result.slices);
  return result;
}

struct numbers_of_module {
  at::Tensor output;
  at::Tensor input_grad; // undefined for indices
  std::map<std::string, at::Tensor> grads;
};

/// Forward and backward of all samples by torch alone.
/// @param f takes the input and the parameters by their names
template <class F>
numbers_of_module alone(const native_module& x, at::Tensor input,
                        const at::Tensor& seed, F f) {
  numbers_of_module result;
  auto leaves = x.parameters;
  for (auto& [name, t] : leaves)
    t = t.detach().clone().requires_grad_();
  if (input.is_floating_point())
    input = input.detach().clone().requires_grad_();
  at::Tensor y = f(input, leaves);
  y.backward(seed);
  result.output = y.detach();
  result.input_grad = input.grad();
  for (auto& [name, t] : leaves)
    result.grads[name] = t.grad().to_dense();
  return result;
}

/// What all peers have alike.
inline at::Tensor same_of_all(const std::vector<at::Tensor>& xs) {
  for (auto& x : xs)
    REQUIRE(
      (x.defined() == xs[0].defined() && (!x.defined() || x.equal(xs[0]))));
  return xs[0];
}

/// The same shared by peers, each with its part of the samples, or all of them.
/// @param mask a second argument, by samples or [1, ...]; undefined: none
inline numbers_of_module together(const native_module& x,
                                  const at::Tensor& input,
                                  const at::Tensor& seed, uint64_t peers,
                                  const at::Tensor& mask = {},
                                  bool same_samples = false) {
  auto parts_of = [&](const at::Tensor& x) {
    return same_samples || !x.defined() || x.size(0) == 1
             ? std::vector<at::Tensor>(peers, x)
             : x.chunk(static_cast<int64_t>(peers), 0);
  };
  auto inputs = parts_of(input);
  auto seeds = parts_of(seed);
  auto masks = parts_of(mask);
  std::vector<shared_module> modules;
  for (uint64_t i = 0; i < peers; ++i)
    modules.push_back(share(x, i, peers));
  std::vector<at::Tensor> outputs(peers), input_grads(peers);
  thread_group group{peers, same_samples};
  group.on_all([&](uint64_t i) {
    auto mine = inputs[i].detach().clone();
    if (mine.is_floating_point())
      mine.requires_grad_();
    std::vector<at::Tensor> xs{mine};
    if (mask.defined())
      xs.push_back(masks[i]);
    auto y = modules[i].module->forward(xs).at(0);
    y.backward(seeds[i]);
    outputs[i] = y.detach();
    input_grads[i] = mine.grad();
  });
  numbers_of_module result;
  auto all_of = [&](const std::vector<at::Tensor>& xs) {
    return same_samples ? same_of_all(xs) : at::cat(xs, 0);
  };
  result.output = all_of(outputs);
  if (input.is_floating_point())
    result.input_grad = all_of(input_grads);
  for (auto& [name, whole] : x.parameters) {
    std::vector<at::Tensor> parts;
    for (auto& m : modules) {
      auto& p = m.mine.parameters.at(name);
      parts.push_back(p.grad().defined() ? p.grad().to_dense()
                                         : at::zeros_like(p));
    }
    auto slice = modules[0].slices.find(name);
    // Of what each has as a whole, each has the gradient of its samples.
    if (slice != modules[0].slices.end())
      result.grads[name] = slice->second.merged(parts);
    else
      result.grads[name] = same_samples ? same_of_all(parts)
                                        : at::stack(parts).sum(0);
  }
  return result;
}

inline void check_equal(const numbers_of_module& a, const numbers_of_module& b,
                        double relative) {
  auto near = [&](const at::Tensor& x, const at::Tensor& y) {
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

inline double digits_of(at::ScalarType x) {
  return x == at::kDouble ? 1e-12 : x == at::kFloat ? 1e-5 : 3e-2;
}

} // namespace smp::test
