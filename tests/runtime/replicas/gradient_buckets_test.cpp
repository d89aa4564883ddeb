// ctest: seconds=13
#include "tests/support/catch.hpp"

#include "runtime/replicas/gradient_buckets.hpp"
#include "runtime/step/model_state.hpp"
#include "tests/support/torch/numbers.hpp"
#include "tests/support/torch/training_step.hpp"
#include "tests/support/torch/two_ranks.hpp"

#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>
#include <torch/utils.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <vector>

// Gradients that replicas average while others are computed
// (docs/data_parallel.md, R55).

using namespace smp;
using namespace smp::test;

namespace {

constexpr int64_t words = 50;
constexpr int64_t width = 64;
constexpr int64_t inner = 2304; // 590 KB a matrix

/// Several buckets of 1 MB; a tower that the data choose and that is reached
/// more or less often; a parameter that nobody uses; one used twice.
template <template <class> class P>
struct layers_impl : torch::nn::Module {
  explicit layers_impl(bool sparse)
    : table(torch::nn::EmbeddingOptions(words, width).sparse(sparse)) {
    register_module("table", table);
    register_module("up", up);
    register_module("down", down);
    register_module("even", even);
    register_module("odd", odd);
    register_module("never", never);
    register_module("head", head);
    scale = register_parameter("scale", torch::full({}, 0.5));
  }

  Tensor forward(Tensor x) {
    auto h = table(x).mean(1);
    h = down(torch::tanh(up(h)));
    auto first = x[0][0].template item<int64_t>();
    h = first % 2 == 0 ? even(h) : odd(h).tanh();
    if (first % 3 == 0)
      h = even(h);
    return (head(h.tanh()) * scale + head(h)).square().mean();
  }

  P<torch::nn::Embedding> table;
  P<torch::nn::Linear> up{width, inner}, down{inner, width};
  P<torch::nn::Linear> even{width, width}, odd{width, width};
  P<torch::nn::Linear> never{width, width}, head{width, 1};
  Tensor scale;
};

struct distributed_layers_impl : layers_impl<submodule> {
  using layers_impl::layers_impl;
};
TORCH_MODULE_IMPL(distributed_layers, distributed_layers_impl);

/// How gradients are set to zero before a step.
enum class zeroing { drop, in_place, never };

struct job {
  uint64_t pipeline = 1;
  uint64_t replicas = 2; // that share nothing
  uint64_t tensor = 1;
  uint64_t microbatches = 2;
  int64_t steps = 5;
  bool sparse = false; // then only updates are compared
  std::optional<bool> fast_mode = false;
  bool overlaps = true;
  bool shards = false;
  bool shards_gradients = false;
  bool sums = false;
  bool fused = false;
  bool uneven = false; // replicas miss some steps
  bool deterministic = false;
  bool repeats = false; // each step has the data of the first one
  uint64_t passes = 1;
  bool unsynced = false; // passes but the last one are in a scope of no_sync
  comm_hook hook = comm_hook::allreduce;
  zeroing zero = zeroing::drop;

  uint64_t all_replicas() const {
    return replicas * tensor;
  }

  /// Those that share modules do so together.
  bool skips(uint64_t replica, int64_t step) const {
    return uneven && step > 0
           && (static_cast<uint64_t>(step) + replica / tensor) % 3 == 0;
  }

  /// In uneven steps a bias's gradient cancels down to float32's rounding.
  c10::ScalarType type() const {
    return uneven ? torch::kDouble : torch::kFloat;
  }

  closeness allowed() const {
    if (hook == comm_hook::allreduce)
      return {};
    return {hook == comm_hook::fp16_compress ? 1e-2 : 8e-2, 1e-6};
  }

  torch::optim::SGDOptions optimizer() const {
    return torch::optim::SGDOptions(0.1).momentum(sparse ? 0 : 0.5);
  }

  session_config config() const {
    session_config x;
    x.pipeline_parallel_degree = pipeline;
    x.tensor_parallel_degree = tensor;
    if (tensor > 1)
      x.tensor_parallel_modules = {"up", "down"};
    x.microbatches = microbatches;
    x.ddp = true;
    x.threads = 1;
    x.fast_mode = fast_mode;
    x.overlapping_allreduce = overlaps;
    x.bucket_cap_mb = 1;
    x.shard_optimizer_state = shards;
    x.shard_gradients = shards_gradients;
    x.average_grads_across_microbatches = !sums;
    x.backward_passes_per_step = unsynced ? 1 : passes;
    x.deterministic_server = deterministic;
    return x;
  }
};

/// [2 * microbatches * replicas, 3]
Tensor data_of(const job& x, int64_t step) {
  auto rows = static_cast<int64_t>(2 * x.microbatches * x.all_replicas());
  auto y = torch::arange(rows * 3).view({rows, 3}) * 7;
  auto microbatch = torch::arange(rows).div(2, "floor").view({rows, 1});
  return (y + microbatch * step * step + 3 * step) % words;
}

struct training {
  std::vector<numbers> gradients;
  std::vector<numbers> parameters;
};

bool begins_update(const job& x, int64_t step) {
  return step % static_cast<int64_t>(x.passes) == 0;
}

bool ends_update(const job& x, int64_t step) {
  return begins_update(x, step + 1);
}

template <class Optimizer>
void set_to_zero(const job& x, Optimizer& optimizer,
                 const std::vector<Tensor>& parameters) {
  if (x.zero == zeroing::drop)
    optimizer.zero_grad();
  else if (x.zero == zeroing::in_place)
    for (auto& p : parameters)
      if (p.grad().defined())
        p.mutable_grad() = p.grad().is_sparse() ? Tensor{} : p.grad().zero_();
}

/// One process, no line of smp.
training train_alone(const job& x) {
  auto model = seeded([&] { return layers_impl<as_is>{x.sparse}; });
  model.to(x.type());
  torch::optim::SGD sgd{model.parameters(), x.optimizer()};
  training result;
  for (int64_t i = 0; i < x.steps; ++i) {
    if (begins_update(x, i))
      set_to_zero(x, sgd, model.parameters());
    auto parts = data_of(x, i).chunk(
      static_cast<int64_t>(x.all_replicas() * x.microbatches));
    auto share = static_cast<double>(x.sums ? x.all_replicas() : parts.size());
    for (size_t part = 0; part < parts.size(); ++part)
      if (!x.skips(part / x.microbatches, i))
        (model.forward(parts[part]) / share).backward();
    auto& gradients = result.gradients.emplace_back();
    for (auto& p : model.named_parameters())
      if (p.value().grad().defined() && ends_update(x, i) && !x.sparse)
        gradients.emplace(p.key(), p.value().grad().clone());
    if (ends_update(x, i))
      sgd.step();
    auto& parameters = result.parameters.emplace_back();
    for (auto& p : model.named_parameters())
      parameters.emplace(p.key(), p.value().detach().clone());
  }
  return result;
}

/// Whatever may have a gradient: parameters, or the rows of this rank.
std::vector<Tensor> gradients_of(const distributed_model_base& model,
                                 torch::optim::Optimizer& optimizer) {
  auto result = model.local_parameters();
  for (auto& group : optimizer.param_groups())
    for (auto& p : group.params())
      if (std::ranges::none_of(result, [&](auto& x) { return x.is_same(p); }))
        result.push_back(p);
  return result;
}

struct replica_training {
  std::vector<training> ranks; // what each rank saw
  std::vector<gradient_buckets::counts> counts;
};

/// @param seed of the order in which messages come
replica_training train_replicas(const job& x, uint64_t seed = 1) {
  auto ranks = x.pipeline * x.all_replicas();
  replica_training result;
  result.ranks.resize(ranks);
  result.counts.resize(ranks);
  virtual_world_options world;
  world.config = x.config();
  world.reorder = true;
  world.seed = seed;
  run_virtual_world(ranks, world, [&](session& s) {
    auto made = seeded([&] { return distributed_layers{x.sparse}; });
    made->to(x.type());
    distributed_model model{made};
    torch::optim::SGD sgd{model->parameters(), x.optimizer()};
    distributed_optimizer optimizer{sgd, {.fused = x.fused}};
    auto train_step = training_step(model);
    model.register_comm_hook(x.hook);
    auto& mine = result.ranks[s.rank()];
    for (int64_t i = 0; i < x.steps; ++i) {
      if (begins_update(x, i))
        set_to_zero(x, optimizer, gradients_of(model, sgd));
      auto run = [&] {
        if (x.skips(dp_rank(), i))
          train_step.skip();
        else
          train_step(data_of(x, x.repeats ? 0 : i)
                       .chunk(static_cast<int64_t>(x.all_replicas()))
                       .at(dp_rank()));
      };
      if (x.unsynced && !ends_update(x, i)) {
        auto scope = model.no_sync();
        run();
      } else {
        run();
      }
      auto& gradients = mine.gradients.emplace_back();
      if (ends_update(x, i) && !x.sparse)
        for (auto& [name, g] : model.gradients())
          gradients.emplace(name, g);
      if (ends_update(x, i))
        optimizer.step();
      auto state = model.state_dict();
      mine.parameters.emplace_back(state.begin(), state.end());
    }
    result.counts[s.rank()] = model.state().buckets()->take_counts();
  });
  return result;
}

/// @returns what the replicas counted
replica_training check_equal(const job& x) {
  auto expected = train_alone(x);
  auto mine = train_replicas(x);
  for (size_t i = 0; i < static_cast<size_t>(x.steps); ++i) {
    INFO("step " << i);
    CHECK_FALSE(mine.ranks[0].gradients[i].contains("never.weight"));
    check_near(mine.ranks[0].gradients[i], expected.gradients[i], x.allowed());
    check_near(mine.ranks[0].parameters[i], expected.parameters[i],
               x.allowed());
    // The same bits everywhere, or replicas would part.
    for (auto& other : mine.ranks)
      for (auto& [name, t] : mine.ranks[0].parameters[i])
        CHECK(torch::equal(other.parameters[i].at(name), t));
  }
  return mine;
}

} // namespace

TEST_CASE("buckets that begin before the step ends change no number",
          "[runtime][gradient_buckets][R29][R55]") {
  auto [pipeline, replicas, tensor] = GENERATE(
    std::tuple{1u, 2u, 1u}, std::tuple{2u, 2u, 1u}, std::tuple{1u, 3u, 1u},
    std::tuple{1u, 1u, 2u}, std::tuple{1u, 2u, 2u});
  CAPTURE(pipeline, replicas, tensor);
  job x;
  x.pipeline = pipeline;
  x.replicas = replicas;
  x.tensor = tensor;
  if (pipeline > 1)
    x.fast_mode = GENERATE(as<std::optional<bool>>{}, std::nullopt, false);
  auto found = check_equal(x);
  for (auto& c : found.counts)
    if (pipeline * tensor == 1)
      CHECK(c.buckets >= 2);
  auto early = std::ranges::count_if(found.counts,
                                     [](auto& c) { return c.begun_early > 0; });
  CHECK(early > 0);
}

TEST_CASE("a replica without samples takes part as if its gradients were zero",
          "[runtime][gradient_buckets][R55]") {
  job x;
  x.uneven = true;
  std::tie(x.pipeline, x.replicas, x.tensor) = GENERATE(
    std::tuple{2u, 2u, 1u}, std::tuple{1u, 3u, 1u}, std::tuple{1u, 2u, 2u},
    std::tuple{2u, 2u, 2u});
  x.shards = x.shards_gradients = GENERATE(false, true);
  CAPTURE(x.pipeline, x.replicas, x.tensor, x.shards);
  check_equal(x);
}

TEST_CASE("a gradient that comes after its bucket began is added",
          "[runtime][gradient_buckets][R29][R55]") {
  struct seen {
    double gradient;
    gradient_buckets::counts counts;
  };
  std::vector<std::vector<seen>> steps(2); // by rank
  virtual_world_options world;
  world.config = job{}.config();
  run_virtual_world(2, world, [&](session& s) {
    // A microbatch without numbers does not reach the weight.
    distributed_model model{seeded([] {
      return function{[](auto& self, Tensor x) {
        return x.sum().template item<double>() > 0 ? x * self.weight : x * 1;
      }};
    })};
    auto train_step = step([&](Tensor x) {
      auto loss = model(x).sum();
      if (loss.requires_grad())
        model.backward(loss);
      return loss;
    });
    auto all = torch::full({2, 3}, 2.0 + 4.0 * static_cast<double>(s.rank()));
    auto half = all * torch::tensor({{1.0}, {0.0}});
    for (auto& x : {half, half, all, all}) {
      model->weight.mutable_grad().reset();
      train_step(x);
      steps[s.rank()].push_back({model->weight.grad()[0].item<double>(),
                                 model.state().buckets()->take_counts()});
    }
  });
  for (auto& of_rank : steps) {
    std::vector<double> gradients;
    std::vector<uint64_t> early, late;
    for (auto& x : of_rank) {
      gradients.push_back(x.gradient);
      early.push_back(x.counts.begun_early);
      late.push_back(x.counts.late_gradients);
    }
    CHECK(gradients == std::vector<double>{2, 2, 4, 4});
    CHECK(early == std::vector<uint64_t>{0, 1, 1, 1});
    CHECK(late == std::vector<uint64_t>{0, 0, 1, 0});
  }
}

TEST_CASE("replicas that keep parts of gradients wait for the end of no step",
          "[runtime][gradient_buckets][R55]") {
  job x;
  x.pipeline = GENERATE(1u, 2u);
  x.fast_mode = std::nullopt;
  x.shards = x.shards_gradients = true;
  // Nor of the first one; there, what nobody uses keeps its bucket waiting,
  // and which bucket that is follows from the partition.
  x.steps = x.pipeline == 1 ? 1 : 5;
  auto found = check_equal(x);
  CHECK(std::ranges::any_of(found.counts,
                            [](auto& c) { return c.begun_early > 0; }));
}

TEST_CASE("parts of gradients are those of no_sync and of hooks, too",
          "[runtime][gradient_buckets][R53][R55]") {
  job x;
  x.shards = x.shards_gradients = true;
  x.passes = 2;
  x.steps = 4;
  std::tie(x.pipeline, x.tensor) = GENERATE(
    std::tuple{1u, 1u}, std::tuple{2u, 1u}, std::tuple{2u, 2u});
  x.unsynced = GENERATE(false, true);
  x.hook = GENERATE(comm_hook::allreduce, comm_hook::bf16_compress);
  CAPTURE(x.pipeline, x.tensor, x.unsynced, int(x.hook));
  check_equal(x);
}

TEST_CASE("two runs of replicas have the same bits",
          "[runtime][gradient_buckets][deterministic]") {
  job x{.microbatches = 3};
  std::tie(x.pipeline, x.replicas, x.tensor) = GENERATE(
    std::tuple{1u, 2u, 1u}, std::tuple{1u, 3u, 1u}, std::tuple{2u, 2u, 1u},
    std::tuple{2u, 2u, 2u});
  std::tie(x.shards, x.shards_gradients) = GENERATE(
    std::tuple{false, false}, std::tuple{true, false}, std::tuple{true, true});
  // Else calls of a pipeline, or buckets of parts, add up as they come.
  x.deterministic = x.shards_gradients || x.pipeline > 1;
  x.repeats = x.pipeline > 1; // a step that diverges goes as it comes
  CAPTURE(x.pipeline, x.replicas, x.tensor, x.shards, x.shards_gradients);
  auto first = train_replicas(x, 1);
  auto again = train_replicas(x, 2);
  for (size_t i = 0; i < static_cast<size_t>(x.steps); ++i) {
    INFO("step " << i);
    for (auto part : {&training::gradients, &training::parameters})
      for (auto& [name, y] : (first.ranks[0].*part)[i]) {
        INFO(name);
        CHECK(torch::equal((again.ranks[0].*part)[i].at(name), y));
      }
  }
}

TEST_CASE("any mix of options computes what one process does",
          "[runtime][gradient_buckets][R55]") {
  auto seed = GENERATE(range(0u, 24u));
  std::mt19937 draw{seed};
  auto coin = [&] { return draw() % 2 == 0; };
  job x;
  x.steps = 4;
  x.pipeline = 1 + draw() % 2;
  x.replicas = 2;
  x.tensor = coin() ? 2 : 1;
  x.microbatches = 1 + draw() % 3;
  x.sparse = coin();
  x.fast_mode = coin() ? std::optional<bool>{} : std::optional{coin()};
  x.overlaps = draw() % 4 > 0;
  x.shards = coin();
  x.sums = coin();
  x.fused = coin();
  x.passes = coin() ? 2 : 1;
  x.zero = coin() ? zeroing::drop : coin() ? zeroing::in_place : zeroing::never;
  x.shards_gradients = x.shards && coin();
  x.uneven = x.tensor == 1 && coin();
  x.unsynced = x.passes > 1 && coin();
  x.hook = std::array{comm_hook::allreduce, comm_hook::fp16_compress,
                      comm_hook::bf16_compress}[draw() % 3];
  CAPTURE(seed, x.pipeline, x.replicas, x.tensor, x.microbatches, x.sparse,
          x.fast_mode.has_value(), x.fast_mode.value_or(false), x.overlaps,
          x.shards, x.shards_gradients, x.sums, x.passes, x.uneven, x.unsynced,
          int(x.hook), int(x.zero));
  check_equal(x);
}

TEST_CASE("gradients are views of buckets, and one that is the user's stays",
          "[runtime][gradient_buckets]") {
  virtual_world_options world;
  world.config = job{}.config();
  run_virtual_world(2, world, [&](session& s) {
    distributed_model model{seeded([] { return distributed_layers{false}; })};
    auto train_step = training_step(model);
    auto x = data_of({}, 0).chunk(2).at(s.rank());
    train_step(x);
    auto own = torch::ones_like(model->up->weight);
    auto alias = own.view(-1);
    auto kept = model->down->weight.grad();
    auto before = kept.clone();
    for (auto& p : model.local_parameters())
      p.mutable_grad().reset();
    model->up->weight.mutable_grad() = own;
    train_step(x);
    // One process has no such tensor, and adds to what is there.
    auto same = model->up->weight.grad().is_same(own);
    auto sum = alias.view_as(own) - 1;
    std::set<const void*> memory;
    for (auto& p : model.local_parameters())
      if (p.grad().defined())
        memory.insert(p.grad().storage().data());
    auto fail = [](const char* what) { throw std::runtime_error{what}; };
    if (!same)
      fail("the user's gradient was replaced");
    if (!torch::equal(kept, before))
      fail("a gradient that was kept has changed");
    if (memory.size() >= 9)
      fail("gradients share no memory");
    // The same step once more, all gradients dropped.
    for (auto& p : model.local_parameters())
      p.mutable_grad().reset();
    train_step(x);
    if (!torch::allclose(model->up->weight.grad(), sum, 1e-5, 1e-6))
      fail("the user's gradient was not added to");
  });
}

TEST_CASE("a step that fails leaves nothing that parts the replicas",
          "[runtime][gradient_buckets][R49][R55]") {
  auto drops = GENERATE(true, false);
  CAPTURE(drops);
  std::vector<numbers> after(2);
  auto expected = train_alone({.steps = 1});
  virtual_world_options world;
  world.config = job{}.config();
  run_virtual_world(2, world, [&](session& s) {
    distributed_model model{seeded([] { return distributed_layers{false}; })};
    auto bad = false;
    auto train_step = step([&](Tensor y) {
      auto loss = model(y);
      model.backward(loss);
      // By then the first replica has begun buckets.
      if (bad && s.rank() == 1)
        throw std::runtime_error{"no more data"};
      return loss;
    });
    auto x = data_of({}, 0).chunk(2).at(s.rank());
    auto drop = [&] {
      for (auto& p : model.local_parameters())
        p.mutable_grad().reset();
    };
    for (auto i = 0; i < 3; ++i) {
      drop();
      train_step(x);
    }
    bad = true;
    drop();
    auto failed = false;
    try {
      train_step(x);
    } catch (const error& e) {
      failed = e.code() == error_code::user_code;
    }
    if (!failed)
      throw std::runtime_error{"the step did not fail"};
    bad = false;
    if (drops)
      drop();
    train_step(x);
    auto gradients = model.gradients();
    after[s.rank()] = {gradients.begin(), gradients.end()};
  });
  for (auto& [name, x] : after[0]) {
    INFO(name);
    CHECK(torch::equal(after[1].at(name), x));
  }
  if (drops)
    check_near(after[0], expected.gradients[0]);
}

TEST_CASE("norms and checks see gradients of which replicas have parts",
          "[runtime][gradient_buckets][R22]") {
  auto norms = [](const job& x) {
    std::vector<std::tuple<double, bool>> result(x.pipeline * x.all_replicas());
    virtual_world_options world;
    world.config = x.config();
    run_virtual_world(result.size(), world, [&](session& s) {
      distributed_model model{
        seeded([&] { return distributed_layers{false}; })};
      torch::optim::SGD sgd{model->parameters(), 0.1};
      distributed_optimizer optimizer{sgd};
      auto train_step = training_step(model);
      train_step(data_of(x, 0)
                   .chunk(static_cast<int64_t>(x.all_replicas()))
                   .at(dp_rank()));
      auto before = any_nonfinite(model);
      auto norm = clip_grad_norm_(model, 1e-3);
      if (before || std::abs(clip_grad_norm_(model, 1.0) - 1e-3) > 1e-6)
        throw std::runtime_error{"not clipped"};
      for (auto& g : gradients_of(model, sgd))
        if (s.rank() == 0 && g.grad().defined())
          g.mutable_grad().fill_(std::nan(""));
      result[s.rank()] = {norm, any_nonfinite(model)};
    });
    return result;
  };
  for (auto x : {job{.pipeline = 2}, job{.replicas = 1, .tensor = 2}}) {
    auto whole = norms(x);
    x.shards = x.shards_gradients = true;
    auto parts = norms(x);
    for (size_t i = 0; i < whole.size(); ++i) {
      CHECK(std::abs(std::get<0>(parts[i]) / std::get<0>(whole[i]) - 1) < 1e-5);
      CHECK(std::get<0>(parts[i]) == std::get<0>(parts[0]));
      CHECK(std::get<1>(parts[i]));
    }
  }
}
