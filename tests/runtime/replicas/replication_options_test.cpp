#include "tests/support/catch.hpp"

#include "tests/support/error_of.hpp"
#include "tests/support/torch/training_step.hpp"
#include "tests/support/torch/two_ranks.hpp"

#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/linear.h>
#include <torch/utils.h>

#include <atomic>
#include <cmath>
#include <mutex>
#include <numeric>
#include <string>
#include <vector>

// What a program says about replicas: when and how gradients are averaged, and
// whose buffers count (docs/data_parallel.md).

using namespace smp;
using namespace smp::test;
using Catch::Matchers::ContainsSubstring;

namespace {

session_config replicated() {
  session_config x;
  x.ddp = true;
  x.threads = 1;
  return x;
}

function product() {
  return seeded([] {
    return function{[](auto& self, Tensor x) { return x * self.weight; }};
  });
}

/// Each rank's gradient is what it is given: 2 on rank 0, 6 on rank 1.
Tensor data_of(session& s) {
  return torch::full({2, 3}, 2.0 + 4.0 * static_cast<double>(s.rank()));
}

/// Runs `f` on two replicas with a step whose gradient is the mean of its
/// argument's rows, times 2. @returns what each noted
template <class F>
std::vector<std::vector<double>> notes_of(session_config config, F f) {
  std::vector<std::vector<double>> result(2);
  virtual_world_options world;
  world.config = std::move(config);
  run_virtual_world(2, world, [&](session& s) {
    distributed_model model{product()};
    auto train_step = training_step(model, sum_of);
    auto note = [&] {
      result[s.rank()].push_back(model->weight.grad()[0].item<double>() / 2);
    };
    f(s, model, train_step, note);
  });
  return result;
}

} // namespace

TEST_CASE("steps in a scope of no_sync add up, and the next one averages all",
          "[runtime][replicas][R55]") {
  auto notes = notes_of(replicated(),
                        [](auto& s, auto& model, auto& train_step, auto& note) {
                          auto x = data_of(s);
                          train_step(x);
                          note();
                          {
                            auto scope = model.no_sync();
                            train_step(x);
                            note();
                            train_step(x);
                            note();
                          }
                          train_step(x);
                          note();
                          // An evaluation averages what was left; nobody
                          // trained meanwhile.
                          model->weight.mutable_grad().reset();
                          {
                            auto scope = model.no_sync();
                            train_step(x);
                          }
                          model->weight.mutable_grad().reset();
                          train_step(x);
                          note();
                        });
  CHECK(notes[0] == std::vector<double>{4, 6, 8, 16, 4});
  CHECK(notes[1] == std::vector<double>{4, 10, 16, 16, 4});
}

TEST_CASE("the last batch may be short, and its samples weigh what they should",
          "[runtime][replicas]") {
  auto samples = torch::arange(12).to(torch::kFloat).view({4, 3}).square();
  // One process with all of them.
  auto weight = torch::ones({3}).requires_grad_();
  (samples * weight).mean().backward();
  std::vector<Tensor> gradients(2);
  virtual_world_options world;
  world.config = replicated();
  world.config.microbatches = 2; // of other batches
  run_virtual_world(2, world, [&](session& s) {
    distributed_model model{product()};
    auto last_step = step(
      [&](Tensor x, double weight) {
        auto loss = model(x).mean() * weight;
        model.backward(loss);
        return loss;
      },
      {.microbatches = 1});
    auto x = s.rank() == 0 ? samples.slice(0, 0, 3) : samples.slice(0, 3);
    auto counts = allgather(x.size(0), comm_group::dp);
    auto all = std::accumulate(counts.begin(), counts.end(), int64_t{0});
    last_step(x, static_cast<double>(x.size(0)) * 2 / static_cast<double>(all));
    gradients[s.rank()] = model->weight.grad().clone();
  });
  for (auto& g : gradients)
    CHECK(torch::allclose(g, weight.grad(), 1e-6, 1e-7));
}

TEST_CASE("replicas that do not agree on no_sync are told",
          "[runtime][replicas][R55]") {
  std::mutex mutex;
  std::vector<std::string> texts;
  notes_of(replicated(), [&](auto& s, auto& model, auto& train_step, auto&) {
    auto x = data_of(s);
    auto run = [&] {
      try {
        train_step(x);
      } catch (const error& e) {
        std::unique_lock guard{mutex};
        texts.push_back(e.cause().text);
      }
    };
    if (s.rank() == 0) {
      auto scope = model.no_sync();
      run();
    } else {
      run();
    }
  });
  REQUIRE(texts.size() == 2);
  for (auto& x : texts)
    CHECK(x.find("replicas do not agree on no_sync") != std::string::npos);
}

TEST_CASE("no step is skipped before the model is partitioned",
          "[runtime][replicas][R55]") {
  std::vector<std::string> texts(2);
  virtual_world_options world;
  world.config = replicated();
  run_virtual_world(2, world, [&](session& s) {
    distributed_model model{product()};
    auto train_step = training_step(model, sum_of);
    texts[s.rank()] = error_of([&] { train_step.skip(); });
  });
  for (auto& x : texts)
    CHECK_THAT(x, ContainsSubstring("call the model's partition"));
}

TEST_CASE("peers skip a step together, or all hear who did alone",
          "[runtime][replicas][R31]") {
  std::vector<std::string> texts(4);
  std::vector<double> gradients(4);
  virtual_world_options world;
  world.config = replicated();
  world.config.tensor_parallel_degree = 2; // ranks 0 and 1, and 2 and 3
  run_virtual_world(4, world, [&](session& s) {
    distributed_model model{product()};
    auto train_step = training_step(model, sum_of);
    model.partition();
    auto run = [&](bool skips) {
      if (skips)
        train_step.skip();
      else
        train_step(data_of(s));
    };
    texts[s.rank()] = error_of([&] { run(s.rank() == 3); });
    model->weight.mutable_grad().reset();
    run(s.rank() >= 2);
    gradients[s.rank()] = model->weight.grad()[0].item<double>() / 2;
  });
  for (auto& x : texts)
    CHECK_THAT(x, ContainsSubstring("rank 3: skipped a step that rank 2 runs"));
  // The mean of 2, 6 and two zeros.
  CHECK(gradients == std::vector<double>{2, 2, 2, 2});
}

namespace {

struct uneven_data {
  uint64_t pipeline;
  uint64_t tensor;
  std::vector<int> batches;  // of each rank; pipelines read by their first one
  std::vector<double> means; // over replicas, by step
};

} // namespace

TEST_CASE("data may end at different times, whichever ranks work together",
          "[runtime][replicas][R55]") {
  auto x = GENERATE(uneven_data{1, 1, {3, 1, 2, 0}, {4.5, 3, 0.5}},
                    uneven_data{1, 2, {3, 1, 2, 0}, {4.5, 3, 0.5}},
                    uneven_data{2, 1, {3, 0, 1, 0}, {6, 1, 1}});
  CAPTURE(x.pipeline, x.tensor);
  std::vector<std::vector<double>> notes(4);
  virtual_world_options world;
  world.config = replicated();
  world.config.pipeline_parallel_degree = x.pipeline;
  world.config.tensor_parallel_degree = x.tensor;
  run_virtual_world(4, world, [&](session& s) {
    distributed_model model{product()};
    auto train_step = step([&](Tensor y, double weight) {
      auto loss = model(y).sum() * weight;
      model.backward(loss);
      return loss;
    });
    model.partition(); // there is a rank without any
    for (int i = 0;; ++i) {
      auto mine = i < x.batches.at(s.rank());
      if (!any_rank(mine))
        break;
      if (pp_rank() == 0)
        model->weight.mutable_grad().reset();
      if (any_rank(mine, comm_group::mp))
        train_step(mine ? data_of(s) : torch::ones({2, 3}), mine ? 1.0 : 0.0);
      else
        train_step.skip();
      if (pp_rank() == 0)
        notes[s.rank()].push_back(model->weight.grad()[0].item<double>() / 2);
    }
  });
  for (uint64_t rank = 0; rank < 4; rank += x.pipeline) {
    INFO("rank " << rank);
    CHECK(notes[rank] == x.means);
  }
}

TEST_CASE("gradients of several training steps are averaged at once",
          "[runtime][replicas][R55]") {
  auto config = replicated();
  config.backward_passes_per_step = 3;
  auto notes = notes_of(config,
                        [](auto& s, auto& model, auto& train_step, auto& note) {
                          auto look = step([&](Tensor x) {
                            torch::NoGradGuard no_grad;
                            return model(x).sum();
                          });
                          auto x = data_of(s);
                          for (auto i = 0; i < 2; ++i) {
                            model->weight.mutable_grad().reset();
                            train_step(x);
                            note();
                            look(x); // counts for nothing
                            train_step(x);
                            note();
                            train_step(x);
                            note();
                          }
                        });
  CHECK(notes[0] == std::vector<double>{2, 4, 12, 2, 4, 12});
  CHECK(notes[1] == std::vector<double>{6, 12, 12, 6, 12, 12});
}

TEST_CASE("gradients are the sum over microbatches where that is wanted",
          "[runtime][replicas][R15]") {
  auto config = replicated();
  config.microbatches = 2;
  for (auto averages : {true, false}) {
    config.average_grads_across_microbatches = averages;
    auto notes = notes_of(config,
                          [](auto& s, auto&, auto& train_step, auto& note) {
                            train_step(data_of(s));
                            note();
                          });
    // Each microbatch has one row of two.
    CHECK(notes[0] == std::vector<double>{averages ? 2.0 : 4.0});
    CHECK(notes[1] == notes[0]);
  }
}

TEST_CASE("a comm hook sends gradients in fewer digits",
          "[runtime][replicas]") {
  auto third = [](comm_hook hook) {
    return notes_of(
      replicated(), [hook](auto& s, auto& model, auto& train_step, auto& note) {
        model.register_comm_hook(hook);
        train_step(torch::full({2, 3}, s.rank() == 0 ? 1.0 / 3 : 1.0));
        note();
      });
  };
  auto exact = third(comm_hook::allreduce);
  CHECK(std::abs(exact[0][0] - 2.0 / 3) < 1e-7);
  for (auto [hook, digits] : {std::pair{comm_hook::fp16_compress, 1e-3},
                              std::pair{comm_hook::bf16_compress, 1e-2}}) {
    auto notes = third(hook);
    CHECK(notes[0] == notes[1]);
    CHECK(notes[0] != exact[0]);
    CHECK(std::abs(notes[0][0] - 2.0 / 3) < digits);
  }
}

TEST_CASE("a comm hook may be a function of the program, over each bucket",
          "[runtime][replicas]") {
  auto with = [](const bucket_hook& hook, uint64_t steps) {
    return notes_of(
      replicated(), [&](auto& s, auto& model, auto& train_step, auto& note) {
        model.register_comm_hook(hook);
        for (uint64_t i = 0; i < steps; ++i) { // buckets are agreed upon in 1
          model->zero_grad();
          train_step(torch::full({2, 3}, s.rank() == 0 ? 1.0 / 3 : 1.0));
        }
        note();
      });
  };
  std::atomic<int> calls = 0;
  auto mean = [&](const at::Tensor& x, const comm_group& over) {
    ++calls;
    return allreduce(x.mul(2), over, reduce_op::mean, "my hook").div(2);
  };
  auto steps = GENERATE(1u, 3u);
  auto notes = with(mean, steps);
  CHECK(calls >= static_cast<int>(2 * steps));
  CHECK(notes[0] == notes[1]);
  CHECK(std::abs(notes[0][0] - 2.0 / 3) < 1e-6);
  auto short_one = [](const at::Tensor& x, const comm_group&) {
    return x.narrow(0, 0, 1);
  };
  CHECK_THAT(error_of([&] { with(short_one, 1); }),
             Catch::Matchers::ContainsSubstring(
               "has to return as many, but returned 1 "));
}

namespace {

struct normed_impl : torch::nn::Module {
  normed_impl() {
    register_module("norm", norm);
    register_module("out", out);
  }

  Tensor forward(Tensor x) {
    return out(norm(x));
  }

  submodule<torch::nn::BatchNorm1d> norm{4};
  submodule<torch::nn::Linear> out{4, 4};
};
TORCH_MODULE_IMPL(normed, normed_impl);

struct buffer_grid {
  uint64_t pipeline = 1, tensor = 1, replicas = 1;
};

} // namespace

TEST_CASE("buffers are each replica's own, or the first one's",
          "[runtime][replicas]") {
  auto broadcasts = GENERATE(false, true);
  auto of = GENERATE(buffer_grid{1, 1, 2}, buffer_grid{2, 1, 2},
                     buffer_grid{1, 2, 1}, buffer_grid{1, 2, 2},
                     buffer_grid{2, 2, 2});
  CAPTURE(broadcasts, of.pipeline, of.tensor, of.replicas);
  std::vector<Tensor> means(of.tensor * of.replicas);
  std::mutex mutex;
  virtual_world_options world;
  world.config = replicated();
  world.config.pipeline_parallel_degree = of.pipeline;
  world.config.tensor_parallel_degree = of.tensor;
  if (of.tensor > 1)
    world.config.tensor_parallel_modules = {"out"};
  world.config.broadcast_buffers = broadcasts;
  run_virtual_world(means.size() * of.pipeline, world, [&](session&) {
    distributed_model model{seeded([] { return normed{}; })};
    set_partition(*model->norm, static_cast<uint32_t>(of.pipeline - 1));
    auto train_step = training_step(model, square_sum_of);
    auto x = torch::arange(16.0).view({4, 4})
             + 100 * static_cast<double>(dp_rank());
    train_step(x);
    if (pp_rank() != of.pipeline - 1)
      return;
    std::lock_guard guard{mutex};
    means[dp_rank()] = model->norm->running_mean.clone();
  });
  // A tenth of the mean of 0, 4, 8, 12 and so on.
  auto own = torch::tensor({0.6, 0.7, 0.8, 0.9});
  for (size_t i = 0; i < means.size(); ++i)
    CHECK(torch::allclose(
      means[i], broadcasts ? own : own + 10 * static_cast<double>(i)));
}
