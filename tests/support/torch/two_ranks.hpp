#pragma once

#include "runtime/session/rank_runtime.hpp"
#include "smp/smp.hpp"

#include <torch/nn/module.h>
#include <torch/types.h>

#include <functional>
#include <map>
#include <mutex>
#include <string>

namespace smp::test {

using torch::Tensor;

/// Virtual ranks without automatic placement: what is not pinned is on rank 0.
inline virtual_world_options manual_world(uint64_t ranks = 2,
                                          uint64_t microbatches = 1) {
  virtual_world_options result;
  result.config.pipeline_parallel_degree = ranks;
  result.config.microbatches = microbatches;
  result.config.auto_partition = false;
  result.config.threads = 1;
  result.reorder = true;
  return result;
}

/// Makes a model with the same random numbers on each rank, one at a time: the
/// generator is the process's.
template <class F>
auto seeded(F make) {
  static std::mutex mutex;
  std::unique_lock guard{mutex};
  torch::manual_seed(11);
  return make();
}

/// The parts of a model that runs in plain LibTorch, where that of the ranks
/// has a `submodule`.
template <class Holder>
using as_is = Holder;

/// A module with one parameter, `weight`, and any code.
struct function_impl : torch::nn::Module {
  using code = std::function<Tensor(function_impl&, Tensor)>;

  explicit function_impl(code f, Tensor w = torch::ones({3}))
    : weight(register_parameter("weight", w)), f(std::move(f)) {
    // nop
  }

  Tensor forward(Tensor x) {
    return f(*this, x);
  }

  Tensor weight;
  code f;
};
TORCH_MODULE_IMPL(function, function_impl);

/// A model of one intercepted module on rank 1, called by any code on rank 0.
struct caller_impl : torch::nn::Module {
  using code = std::function<Tensor(caller_impl&, Tensor)>;

  caller_impl(function_impl::code remote, code local)
    : here(register_parameter("here", torch::full({3}, 2.0))),
      f(std::move(local)) {
    partition_scope on_rank_1{1};
    there = submodule<function>(std::move(remote));
    register_module("there", there);
  }

  Tensor forward(Tensor x) {
    return f(*this, x);
  }

  Tensor here;
  submodule<function> there = nullptr;
  code f;
};
TORCH_MODULE_IMPL(caller, caller_impl);

/// What a step over `caller` gave: its loss and all gradients.
struct toy_result {
  Tensor loss;
  std::map<std::string, Tensor> gradients;
  std::map<std::string, Tensor> state;
  uint64_t requests = 0; // of both ranks
};

/// Runs forward, sum, backward once; on one rank or with `there` on another.
inline toy_result run_toy(uint64_t ranks, function_impl::code remote,
                          caller_impl::code local, Tensor x) {
  toy_result result;
  auto world = manual_world(ranks);
  std::mutex mutex;
  run_virtual_world(ranks, world, [&](session& s) {
    distributed_model model{seeded([&] { return caller{remote, local}; })};
    if (ranks == 1) // the model pins it to rank 1
      model->there->smp_hook.pinned = 0;
    auto train_step = step([&](Tensor x) {
      auto y = model(x);
      auto loss = y.sum();
      if (loss.requires_grad())
        model.backward(loss);
      return loss;
    });
    auto loss = train_step(x).reduce_mean();
    auto gradients = model.gradients();
    auto state = model.state_dict();
    std::unique_lock guard{mutex};
    result.requests += s.last_step().requests;
    if (s.rank() == 0) {
      result.loss = loss;
      result.gradients = {gradients.begin(), gradients.end()};
      result.state = {state.begin(), state.end()};
    }
  });
  return result;
}

} // namespace smp::test
