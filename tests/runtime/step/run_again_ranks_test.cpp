#include "tests/support/catch.hpp"

#include "tests/support/nothing_left.hpp"
#include "tests/support/torch/models.hpp"
#include "tests/support/torch/numbers.hpp"
#include "tests/support/torch/two_ranks.hpp"

#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>

#include <mutex>
#include <string>
#include <vector>

// Steps that are run again (R42) where a promise breaks between ranks of which
// none runs the step body, in one of several replicas, and in one of several
// pipelines that share modules.

using namespace smp;
using namespace smp::test;

using Catch::Matchers::ContainsSubstring;

namespace {

constexpr int64_t width = 6;
constexpr int64_t rows = 2; // of a microbatch

/// Its result has another type in microbatches that name it.
template <template <class> class P>
struct odd_layer : torch::nn::Module {
  odd_layer(int64_t number, double dropout) : number(number), drop(dropout) {
    register_module("fc", fc);
    register_module("drop", drop);
  }

  /// @param odd [rows, 1]: the number of the layer that is odd
  Tensor forward(Tensor x, Tensor odd) {
    auto y = drop(torch::tanh(fc(x)));
    return odd[0][0].template item<int64_t>() == number ? y.to(torch::kDouble)
                                                        : y;
  }

  int64_t number;
  torch::nn::Linear fc{width, width};
  torch::nn::Dropout drop;
};

template <template <class> class P>
using odd_part = P<torch::nn::ModuleHolder<odd_layer<P>>>;

/// Lives on rank 2, and calls one on rank 3 and what follows on rank 1.
template <template <class> class P>
struct odd_caller : torch::nn::Module {
  odd_caller() {
    {
      partition_scope on{3};
      inner = odd_part<P>(2, 0.2);
    }
    partition_scope on{1};
    after = P<torch::nn::Linear>(width, width);
    register_module("inner", inner);
    register_module("after", after);
  }

  Tensor forward(Tensor x, Tensor odd) {
    return after(inner(torch::tanh(x), odd).to(torch::kFloat));
  }

  odd_part<P> inner = nullptr;
  P<torch::nn::Linear> after = nullptr;
};

/// [rows, 1 + width]: which layer is odd, and what goes in.
template <template <class> class P>
struct odd_model : torch::nn::Module {
  odd_model() {
    {
      partition_scope on{1};
      first = odd_part<P>(1, 0.2);
    }
    {
      partition_scope on{2};
      outer = outer_part{};
    }
    partition_scope on{3};
    last = odd_part<P>(3, 0.2);
    register_module("first", first);
    register_module("outer", outer);
    register_module("last", last);
  }

  Tensor forward(Tensor x) {
    auto odd = x.narrow(1, 0, 1);
    auto y = first(x.narrow(1, 1, width), odd).to(torch::kFloat);
    y = outer(y, odd);
    return last(y, odd).to(torch::kFloat).square().mean();
  }

  using outer_part = P<torch::nn::ModuleHolder<odd_caller<P>>>;

  odd_part<P> first = nullptr;
  outer_part outer = nullptr;
  odd_part<P> last = nullptr;
};

/// Two layers on rank 1, and one more where they are called.
template <template <class> class P>
struct odd_pair : torch::nn::Module {
  odd_pair() {
    partition_scope on{1};
    first = odd_part<P>(1, 0.0);
    second = odd_part<P>(2, 0.0);
    register_module("first", first);
    register_module("second", second);
    register_module("head", head);
  }

  Tensor forward(Tensor x) {
    auto odd = x.narrow(1, 0, 1);
    auto y = first(x.narrow(1, 1, width), odd).to(torch::kFloat);
    y = second(y, odd).to(torch::kFloat);
    return head(y).square().mean();
  }

  odd_part<P> first = nullptr, second = nullptr;
  torch::nn::Linear head{width, 1};
};

/// The same with a layer between them that pipelines may share.
template <template <class> class P>
struct odd_around_shared : torch::nn::Module {
  odd_around_shared() {
    partition_scope on{1};
    first = odd_part<P>(1, 0.0);
    second = odd_part<P>(2, 0.0);
    shared = P<torch::nn::Linear>(width, width);
    register_module("first", first);
    register_module("shared", shared);
    register_module("second", second);
    register_module("head", head);
  }

  Tensor forward(Tensor x) {
    auto odd = x.narrow(1, 0, 1);
    auto y = first(x.narrow(1, 1, width), odd).to(torch::kFloat);
    y = second(shared(y), odd).to(torch::kFloat);
    return head(shared(y)).square().mean();
  }

  odd_part<P> first = nullptr, second = nullptr;
  P<torch::nn::Linear> shared = nullptr;
  torch::nn::Linear head{width, 1};
};

template <class H>
using plain = H;

/// @param odd by microbatch
Tensor batch_of(size_t step, const std::vector<int>& odd) {
  auto n = static_cast<int64_t>(odd.size()) * rows;
  auto x = torch::arange(n * (1 + width), torch::kFloat)
           * static_cast<double>(step + 1);
  x = torch::sin(x).view({n, 1 + width});
  for (size_t k = 0; k < odd.size(); ++k)
    x.narrow(0, static_cast<int64_t>(k) * rows, rows)
      .select(1, 0)
      .fill_(static_cast<double>(odd[k]));
  return x;
}

constexpr uint64_t replica_count = 2;
constexpr uint64_t microbatches = 2;

/// Of the microbatches of both replicas. In the third step a promise of the
/// second replica alone does not hold.
const std::vector<std::vector<int>> odd_in_replicas{
  {0, 0, 0, 0}, {0, 0, 0, 0}, {0, 0, 0, 2}, {0, 0, 2, 0}, {0, 0, 0, 0}};

/// What one process, without smp, has as gradients of each step.
template <template <template <class> class> class Impl>
std::vector<numbers> gradients_alone() {
  auto model = make_seeded<holder<Impl, plain>>();
  std::vector<numbers> result;
  for (size_t i = 0; i < odd_in_replicas.size(); ++i) {
    model->zero_grad();
    auto parts = batch_of(i, odd_in_replicas[i])
                   .chunk(static_cast<int64_t>(replica_count * microbatches));
    for (auto& x : parts)
      (model->forward(x) / static_cast<double>(parts.size())).backward();
    auto& mine = result.emplace_back();
    for (auto& x : model->named_parameters())
      mine.emplace(x.key(), x.value().grad().clone());
  }
  return result;
}

/// What the replicas have, by step and dp_rank.
struct seen_by_replicas {
  std::vector<std::vector<numbers>> gradients;
  std::vector<std::vector<std::string>> ran_again;
};

/// @param shares modules that the replicas compute together
template <template <template <class> class> class Impl>
seen_by_replicas run_replicas(std::vector<std::string> shares) {
  seen_by_replicas result;
  auto steps = odd_in_replicas.size();
  result.gradients.assign(steps, std::vector<numbers>(replica_count));
  result.ran_again.assign(steps, std::vector<std::string>(replica_count));
  auto world = manual_world(2, microbatches);
  world.config.ddp = true;
  if (!shares.empty())
    world.config.tensor_parallel_degree = replica_count;
  world.config.tensor_parallel_modules = std::move(shares);
  std::mutex mutex;
  run_virtual_world(2 * replica_count, world, [&](session& s) {
    distributed_model model{make_seeded<holder<Impl, submodule>>()};
    auto train_step = step([&](Tensor x) {
      auto loss = model(x);
      model.backward(loss);
      return loss;
    });
    model.partition();
    for (size_t i = 0; i < steps; ++i) {
      drop_gradients(model);
      auto parts = batch_of(i, odd_in_replicas[i])
                     .chunk(static_cast<int64_t>(replica_count));
      train_step(parts.at(dp_rank()));
      barrier();
      check_nothing_left(s);
      auto whole = tensors_by_name(model.gradients());
      if (s.pp_rank() != 0)
        continue;
      std::unique_lock guard{mutex};
      for (auto& [name, x] : whole)
        result.gradients[i][dp_rank()].emplace(name, x.clone());
      result.ran_again[i][dp_rank()] = s.last_step().ran_again;
    }
  });
  return result;
}

} // namespace

TEST_CASE("a promise that breaks between other ranks has the step run again",
          "[runtime][fast][auto][R42]") {
  auto pipeline = GENERATE(as<std::string>{}, "simple", "1f1b", "interleaved");
  CAPTURE(pipeline);
  // Layer 2 is called by rank 2; 1 and 3 break in the same step. Later on their
  // calls wait.
  const std::vector<std::vector<int>> odd{{0, 0, 0, 0}, {0, 0, 0, 0},
                                          {0, 2, 0, 0}, {0, 0, 1, 3},
                                          {0, 0, 0, 0}, {1, 2, 3, 0}};
  model_options x;
  x.ranks = 4;
  x.microbatches = 4;
  x.pipeline = pipeline;
  x.steps = static_cast<int>(odd.size());
  x.round_robin = false;
  x.fast = std::nullopt;
  std::vector<Tensor> batches;
  for (size_t i = 0; i < odd.size(); ++i)
    batches.push_back(batch_of(i, odd[i]));
  auto steps = run_ranks<odd_model>(x, batches);
  CHECK(differences<odd_model>(x, batches, steps)
        == std::vector<std::string>{});
  REQUIRE(steps.size() == odd.size());
  for (size_t i = 0; i < steps.size(); ++i) {
    INFO("step " << i << ": " << steps[i].stats.ran_again);
    CHECK(steps[i].stats.ran_again.empty() == (i != 2 && i != 3));
  }
  CHECK_THAT(steps[2].stats.ran_again,
             ContainsSubstring("module outer.inner")
               && ContainsSubstring("result 0 has dtype Double"));
}

namespace {

/// A promise of the second one breaks in the third step.
void check_replicas(const std::vector<numbers>& expected,
                    const seen_by_replicas& seen) {
  for (size_t i = 0; i < expected.size(); ++i) {
    INFO("step " << i);
    for (uint64_t k = 0; k < replica_count; ++k) {
      CAPTURE(k, seen.ran_again[i][k]);
      check_near(seen.gradients[i][k], expected[i]);
      CHECK(seen.ran_again[i][k].empty() == (i != 2));
    }
  }
  CHECK_THAT(seen.ran_again[2][1],
             ContainsSubstring("module second")
               && ContainsSubstring("result 0 has dtype Double"));
}

} // namespace

TEST_CASE("replicas that run a step again have their part in the mean",
          "[runtime][replicas][fast][auto][R42]") {
  check_replicas(gradients_alone<odd_pair>(), run_replicas<odd_pair>({}));
}

TEST_CASE("pipelines that share modules take a step back together",
          "[runtime][tensor_parallel][fast][auto][R42]") {
  check_replicas(gradients_alone<odd_around_shared>(),
                 run_replicas<odd_around_shared>({"shared"}));
}
