#include "tests/support/catch.hpp"

#include "runtime/session/rank_runtime.hpp"
#include "smp/smp.hpp"
#include "tests/support/torch/nn_zoo.hpp"
#include "tests/support/torch/plain_gpt.hpp"
#include "tests/support/torch/script_runs.hpp"

#include <torch/utils.h>

#include <fmt/format.h>

#include <map>
#include <mutex>
#include <set>

// The models of tests/support/torch/nn_zoo.hpp, over ranks and alone.

using namespace smp;
using namespace smp::test;

namespace nn = torch::nn;

using torch::Tensor;

namespace {

using nn_zoo::batch;
using nn_zoo::plain;
using nn_zoo::split;

// -- the comparison -----------------------------------------------------------

constexpr int num_steps = 3;
constexpr double learning_rate = 0.05;

struct record {
  std::map<std::string, Tensor> before, gradients, after;
  std::vector<Tensor> losses;
};

std::map<std::string, Tensor> to_map(const named_tensors& xs) {
  return {xs.begin(), xs.end()};
}

template <class Model>
nn::ModuleHolder<Model> make() {
  return nn::ModuleHolder<Model>{std::make_shared<Model>()};
}

/// Trains on virtual ranks. @returns the steps, and the requests of all
template <template <class> class Model>
std::pair<std::vector<record>, uint64_t>
train_split(const virtual_world_options& world, spread placement,
            const batch& data) {
  std::vector<record> result;
  uint64_t requests = 0;
  std::mutex mutex;
  auto ranks = world.config.pipeline_parallel_degree;
  run_virtual_world(ranks, world, [&](session& s) {
    std::unique_lock guard{mutex}; // the generator is the process's
    torch::manual_seed(5);
    distributed_model model{make<Model<split>>()};
    guard.unlock();
    place(s, model, placement);
    auto train_step = step([&](const batch& in) {
      auto loss = model(in);
      model.backward(loss);
      return loss.detach();
    });
    model.partition();
    for (int i = 0; i < num_steps; ++i) {
      record r;
      r.before = to_map(model.state_dict());
      for (auto& p : model.local_parameters())
        p.mutable_grad() = Tensor{};
      r.losses = train_step(data).outputs();
      r.gradients = to_map(model.gradients());
      r.after = to_map(model.state_dict());
      torch::NoGradGuard no_grad;
      for (auto& p : model.local_parameters())
        if (p.grad().defined())
          p.sub_(p.grad(), learning_rate);
      guard.lock();
      requests += s.last_step().requests;
      if (s.pp_rank() == 0)
        result.push_back(std::move(r));
      guard.unlock();
    }
  });
  return {result, requests};
}

/// Runs the same steps with torch::nn alone (R35, R36).
/// @returns what differs
template <template <class> class Model>
std::vector<std::string> differences(const std::vector<record>& steps,
                                     int64_t microbatches, const batch& data) {
  std::vector<std::string> result;
  auto model = make<Model<plain>>();
  std::map<std::string, Tensor> parameters, state;
  std::set<const void*> seen;
  for (auto& p : model->named_parameters())
    if (seen.insert(p.value().unsafeGetTensorImpl()).second)
      parameters.emplace(p.key(), p.value());
  state = parameters;
  for (auto& b : model->named_buffers())
    if (seen.insert(b.value().unsafeGetTensorImpl()).second)
      state.emplace(b.key(), b.value());
  if (steps.size() != num_steps)
    result.push_back(fmt::format("{} steps", steps.size()));
  for (auto& r : steps) {
    if (r.before.size() != state.size() || r.after.size() != state.size())
      return {fmt::format("{} instead of {} parameters and buffers",
                          r.before.size(), state.size())};
    {
      torch::NoGradGuard no_grad;
      for (auto& [name, x] : state)
        x.copy_(r.before.at(name));
    }
    model->zero_grad();
    for (int64_t k = 0; k < microbatches; ++k) {
      batch part;
      for (auto& x : data)
        part.push_back(x.chunk(microbatches).at(static_cast<size_t>(k)));
      auto loss = model->forward(part);
      (loss / static_cast<double>(microbatches)).backward();
      if (excess(r.losses.at(static_cast<size_t>(k)), loss.detach()) > 0)
        result.push_back(fmt::format("loss of microbatch {}", k));
    }
    for (auto& [name, p] : parameters) {
      auto found = r.gradients.find(name);
      if ((found != r.gradients.end()) != p.grad().defined())
        result.push_back("there is or is no gradient of " + name);
      else if (p.grad().defined() && excess(found->second, p.grad()) > 0)
        result.push_back("gradient of " + name);
    }
    for (auto& [name, x] : state)
      if (excess(r.after.at(name).to(torch::kDouble),
                 x.detach().to(torch::kDouble))
          > 0)
        result.push_back(name + " after the step");
  }
  return result;
}

template <template <class> class Model>
void check() {
  torch::manual_seed(3);
  auto data = Model<plain>::inputs();
  for (uint64_t ranks : {1, 2, 4})
    for (uint64_t microbatches : {1, 4})
      for (auto pipeline : {"simple", "interleaved"})
        for (auto placement : {spread::scattered, spread::automatic}) {
          if (ranks == 1 && placement == spread::scattered)
            continue;
          virtual_world_options world;
          world.config.pipeline_parallel_degree = ranks;
          world.config.microbatches = microbatches;
          world.config.pipeline = pipeline;
          world.config.threads = 1;
          world.reorder = true;
          INFO(fmt::format(
            "pp {}, {} microbatches, {}, {}", ranks, microbatches, pipeline,
            placement == spread::automatic ? "automatic" : "scattered"));
          auto [steps, requests] = train_split<Model>(world, placement, data);
          CHECK(
            differences<Model>(steps, static_cast<int64_t>(microbatches), data)
            == std::vector<std::string>{});
          if (ranks > 1 && placement == spread::scattered)
            CHECK(requests > 0);
        }
}

} // namespace

#define SMP_NN_ROW(model)                                                      \
  TEST_CASE("a torch::nn " #model " has the numbers of one process",           \
            "[runtime][zoo]") {                                                \
    check<nn_zoo::model>();                                                    \
  }

SMP_NN_ROW(skip_link)
SMP_NN_ROW(two_towers)
SMP_NN_ROW(branch)
SMP_NN_ROW(early_exit)
SMP_NN_ROW(experts)
SMP_NN_ROW(reused)
SMP_NN_ROW(unused_output)
SMP_NN_ROW(frozen_trunk)
SMP_NN_ROW(arguments)
SMP_NN_ROW(in_place)
SMP_NN_ROW(convnet)
SMP_NN_ROW(distillation)
SMP_NN_ROW(recurrent)
SMP_NN_ROW(encoder_decoder)
