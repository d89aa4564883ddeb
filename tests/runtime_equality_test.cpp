// ctest: timeout=600
#include "tests/support/catch.hpp"

#include "runtime/engine.hpp"
#include "runtime/models/gpt.hpp"
#include "runtime/smp.hpp"
#include "tests/support/torch_plain_gpt.hpp"

#include <torch/nn/functional/loss.h>
#include <torch/optim/adamw.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <fmt/format.h>

#include <atomic>
#include <mutex>

// R35 to R37: five steps of the quickstart's model against a plain LibTorch
// loop. Each step begins with the pipeline's parameters, so that rounding does
// not add up; the optimizer is fed with the pipeline's gradients.

namespace {

using namespace smp;
using torch::Tensor;

constexpr int64_t vocabulary = 256, length = 8, layers = 4, heads = 4;
constexpr int64_t width = 64, batch = 24;
constexpr int steps = 5;

struct recorded_step {
  std::map<std::string, Tensor> before; // parameters
  std::map<std::string, Tensor> gradients;
  std::map<std::string, Tensor> after;
  std::vector<Tensor> losses; // by microbatch
};

std::map<std::string, Tensor> to_map(const named_tensors& xs) {
  return {xs.begin(), xs.end()};
}

std::pair<Tensor, Tensor> make_batch(int step) {
  auto rows = torch::arange(batch * (length + 1)).add(step * 7919);
  auto x = (rows * rows % 251 + rows % 5).view({batch, length + 1});
  return {x.narrow(1, 0, length), x.narrow(1, 1, length)};
}

Tensor loss_of(const Tensor& logits, const Tensor& y) {
  return torch::nn::functional::cross_entropy(
    logits.reshape({-1, vocabulary}), y.reshape({-1}));
}

std::vector<recorded_step> run_pipeline(const session_config& config,
                                        double dropout) {
  std::vector<recorded_step> result(steps);
  virtual_world_options world;
  world.config = config;
  world.reorder = true;
  std::atomic<uint64_t> leftovers = 0;
  constexpr auto limit = std::chrono::seconds{10};
  static std::mutex generator; // model creation draws from the global one
  run_virtual_world(config.pipeline_parallel_degree, world, [&](session& s) {
    auto make = [&] {
      std::unique_lock guard{generator};
      torch::manual_seed(7);
      gpt_config sizes;
      sizes.vocabulary = vocabulary;
      sizes.sequence_length = length;
      sizes.layers = layers;
      sizes.heads = heads;
      sizes.width = width;
      sizes.dropout = dropout;
      return gpt{sizes};
    };
    distributed_model model{make()};
    torch::optim::AdamW adamw{model->parameters(),
                              torch::optim::AdamWOptions(1e-3)};
    distributed_optimizer optimizer{adamw};
    auto train_step = step([&](Tensor x, Tensor y) {
      auto loss = loss_of(model(x), y);
      model.backward(loss);
      return loss;
    });
    model.partition();
    for (int i = 0; i < steps; ++i) {
      auto [x, y] = make_batch(i);
      auto before = model.state_dict();
      optimizer.zero_grad();
      auto losses = train_step(x, y).outputs();
      auto gradients = model.gradients();
      optimizer.step();
      auto after = model.state_dict();
      // Nothing of a step is left, whatever it did (R3).
      leftovers += s.internals().calls().size();
      leftovers += s.internals().actors().status(limit).pending;
      if (s.rank() == 0)
        result[i] = {to_map(before), to_map(gradients), to_map(after), losses};
    }
  });
  CHECK(leftovers == 0);
  return result;
}

void check_against_reference(const session_config& config, double dropout) {
  auto recorded = run_pipeline(config, dropout);
  test::plain_gpt plain{vocabulary, length, layers, heads, width, dropout};
  auto parameters = plain.named();
  std::vector<Tensor> ordered;
  for (auto& [name, p] : parameters)
    ordered.push_back(p);
  torch::optim::AdamW adamw{ordered, torch::optim::AdamWOptions(1e-3)};
  for (int i = 0; i < steps; ++i) {
    INFO("step " << i);
    auto& r = recorded[i];
    REQUIRE(r.before.size() == parameters.size());
    {
      torch::NoGradGuard no_grad;
      for (auto& [name, p] : parameters)
        p.copy_(r.before.at(name));
    }
    plain.zero_grad();
    auto [x, y] = make_batch(i);
    auto m = static_cast<int64_t>(config.microbatches);
    for (int64_t k = 0; k < m; ++k) {
      torch::manual_seed(microbatch_seed(config.seed, i + 1, 0, k));
      auto part = [&](const Tensor& t) {
        return t.narrow(0, k * batch / m, batch / m);
      };
      auto loss = loss_of(plain.forward(part(x)), part(y));
      (loss / static_cast<double>(m)).backward();
      INFO("microbatch " << k);
      CHECK(test::excess(r.losses.at(k), loss.detach()) <= 0);
    }
    for (auto& [name, p] : parameters) {
      INFO(name);
      CHECK(test::excess(r.gradients.at(name), p.grad()) <= 0);
      p.mutable_grad() = r.gradients.at(name);
    }
    adamw.step();
    for (auto& [name, p] : parameters) {
      INFO(name);
      CHECK(torch::equal(r.after.at(name), p.detach()));
    }
  }
}

} // namespace

TEST_CASE("pipelines give the numbers of one process", "[runtime][equality]") {
  auto pp = GENERATE(1u, 2u, 4u);
  auto pipeline = GENERATE(as<std::string>{}, "simple", "interleaved");
  auto microbatches = GENERATE(1u, 3u, 8u);
  auto dropout = GENERATE(0.0, 0.2);
  DYNAMIC_SECTION(fmt::format("pp {} {} microbatches {} dropout {}", pp,
                              pipeline, microbatches, dropout)) {
    session_config config;
    config.pipeline_parallel_degree = pp;
    config.pipeline = pipeline;
    config.microbatches = microbatches;
    config.threads = 1;
    check_against_reference(config, dropout);
  }
}
