// ctest: seconds=20
#include "tests/support/catch.hpp"

#include "tests/support/torch/models.hpp"
#include "tests/support/torch/near.hpp"
#include "tests/support/torch/small_models.hpp"
#include "tests/support/torch/two_ranks.hpp"

#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/activation.h>

#include <mutex>
#include <string>
#include <vector>

// Modules that change parameters in forward: each call sees what earlier ones
// left, as in one process (R14, R19).

using namespace smp;
using namespace smp::test;

using Catch::Matchers::ContainsSubstring;

namespace {

/// x: [8, 6], another one for each step; only the last has elements above 2.
std::vector<Tensor> batches() {
  std::vector<Tensor> result;
  for (int i = 0; i < 3; ++i)
    result.push_back(
      torch::sin(torch::arange(8 * width).view({8, width}) * 0.7 + i)
      * (i < 2 ? 1 : 3));
  return result;
}

/// An embedding that limits the norm of the rows it looks up. Code outside of
/// it reads its weight: the head is tied to it.
template <template <class> class P>
struct renormed : torch::nn::Module {
  renormed() {
    table = P<Embedding>(torch::nn::EmbeddingOptions(11, width).max_norm(1.0));
    register_module("table", table), register_module("fc", fc);
  }
  Tensor forward(Tensor x) {
    auto tokens = (x.abs() * 10).to(torch::kLong) % 11;
    auto h = torch::tanh(fc(table(tokens).mean(1)));
    return torch::nn::functional::cross_entropy(torch::linear(h, table->weight),
                                                tokens.select(1, 0));
  }
  P<Embedding> table{nullptr};
  P<Linear> fc{width, width};
};

/// How a module changes its weight.
enum class change : uint8_t { own, frozen, unseen, late, saved, buffer };

/// Each call depends on all earlier ones.
template <template <class> class P, change How>
struct changing : torch::nn::Module {
  changing() {
    if (How == change::buffer)
      register_buffer("weight", weight);
    else
      register_parameter("weight", weight, How != change::frozen);
  }
  Tensor forward(Tensor x) {
    if (How != change::late || x.abs().max().template item<double>() > 2) {
      torch::NoGradGuard no_grad;
      auto mean = x.detach().mean(0) * 0.1;
      if (How == change::unseen) // past autograd's version counter
        weight.data().mul_(0.9).add_(mean);
      else
        weight.mul_(0.9).add_(mean);
    }
    // Autograd keeps a factor, which must not change until backward.
    return x * (How >= change::saved ? weight : weight.clone());
  }
  Tensor weight = torch::linspace(0.5, 1.5, width);
};

template <template <class> class P, change How>
struct around : torch::nn::Module {
  around() {
    register_module("before", before), register_module("middle", middle),
      register_module("after", after), register_module("end", end);
  }
  Tensor forward(Tensor x) {
    auto h = middle(before(x) + x);
    return (middle(end(after(torch::tanh(h)))) + x).square().mean();
  }
  P<Linear> before{width, width};
  P<torch::nn::ModuleHolder<changing<P, How>>> middle;
  P<Linear> after{width, width}, end{width, width};
};

/// What it changes is kept for backward, so that it can be called only once.
template <template <class> class P, change How>
struct once : torch::nn::Module {
  once() {
    register_module("before", before), register_module("middle", middle),
      register_module("after", after);
  }
  Tensor forward(Tensor x) {
    return after(torch::tanh(middle(before(x) + x))).square().mean();
  }
  P<Linear> before{width, width};
  P<torch::nn::ModuleHolder<changing<P, How>>> middle;
  P<Linear> after{width, width};
};

template <template <class> class P>
using saved_weight = once<P, change::saved>;
template <template <class> class P>
using saved_buffer = once<P, change::buffer>;
template <template <class> class P>
using own_weight = around<P, change::own>;
template <template <class> class P>
using frozen_weight = around<P, change::frozen>;
template <template <class> class P>
using unseen_weight = around<P, change::unseen>;
template <template <class> class P>
using late_weight = around<P, change::late>;

/// Reads a weight that another module changes.
template <template <class> class P>
struct sharing_part : torch::nn::Module {
  Tensor forward(Tensor x) {
    return torch::tanh(x * weight.clone());
  }
  Tensor weight;
};

template <template <class> class P>
struct shared_weight : torch::nn::Module {
  shared_weight() {
    partition_scope on_rank_1{1};
    writer = {}, reader = {};
    reader->weight = reader->register_parameter("weight", writer->weight);
    register_module("before", before), register_module("writer", writer),
      register_module("reader", reader);
  }
  Tensor forward(Tensor x) {
    auto h = reader(before(x));
    return (reader(writer(h)) + h).square().mean();
  }
  P<Linear> before{width, width};
  P<torch::nn::ModuleHolder<changing<P, change::own>>> writer{nullptr};
  P<torch::nn::ModuleHolder<sharing_part<P>>> reader{nullptr};
};

template <template <template <class> class> class Impl>
void check_all(bool round_robin = true) {
  for (auto again : {model_options::again::none, model_options::again::all})
    for (std::optional<bool> fast : {std::optional<bool>{}, {false}, {true}})
      for (auto x : all_placements()) {
        x.round_robin = round_robin;
        if (x.ranks == 1 && !round_robin)
          continue;
        x.fast = fast;
        x.recompute = again;
        INFO(x.ranks << " ranks, " << x.microbatches << " microbatches, "
                     << x.pipeline << ", fast "
                     << (fast ? *fast ? "on" : "off" : "auto") << ", again "
                     << static_cast<int>(again));
        auto steps = run_ranks<Impl>(x, batches());
        CHECK(differences<Impl>(x, batches(), steps)
              == std::vector<std::string>{});
      }
}

} // namespace

TEST_CASE("an embedding that limits its rows, with a tied head",
          "[runtime][R14][R19]") {
  check_all<renormed>();
}

TEST_CASE("a module that changes its own weight", "[runtime][R14][R19]") {
  check_all<own_weight>();
}

TEST_CASE("a module that changes a weight which backward reads",
          "[runtime][R14][R19]") {
  check_all<saved_weight>();
}

TEST_CASE("a module that changes a buffer which backward reads",
          "[runtime][R19][R42]") {
  check_all<saved_buffer>();
}

TEST_CASE("a module that changes a frozen weight", "[runtime][R14][R19]") {
  check_all<frozen_weight>();
}

TEST_CASE("a module that changes its weight past autograd",
          "[runtime][R14][R19]") {
  check_all<unseen_weight>();
}

TEST_CASE("a module that begins to change its weight later",
          "[runtime][R14][R19]") {
  check_all<late_weight>();
}

TEST_CASE("a module that reads a weight which another one changes",
          "[runtime][R14][R19]") {
  check_all<shared_weight>(false);
}

TEST_CASE("by default, the trace finds a changing parameter",
          "[runtime][R14][R19]") {
  model_options x;
  x.automatic = true;
  x.round_robin = false;
  x.microbatches = 4;
  x.fast = std::nullopt;
  auto steps = run_ranks<renormed>(x, batches());
  CHECK(differences<renormed>(x, batches(), steps)
        == std::vector<std::string>{});
  for (auto& y : steps)
    CHECK(y.stats.ran_again == "");
}

TEST_CASE("a step that ran again for a changing parameter does so once",
          "[runtime][R19][R42]") {
  model_options x;
  x.microbatches = 4;
  x.fast = std::nullopt;
  auto steps = run_ranks<own_weight>(x, batches());
  CHECK_THAT(steps.at(0).stats.ran_again,
             ContainsSubstring("its parameter 'middle.weight' changed"));
  CHECK(steps.at(1).stats.ran_again == "");
  CHECK(steps.at(2).stats.ran_again == "");
}

// -- replicas -----------------------------------------------------------------

namespace {

/// @returns by rank, why the first step of two replicas failed
template <template <template <class> class> class Impl>
std::vector<std::string> train_replicas(uint64_t pipeline, bool same_samples) {
  std::vector<std::string> result(2 * pipeline);
  model_options x;
  x.ranks = pipeline;
  x.microbatches = 2;
  x.fast = std::nullopt;
  auto world = model_world(x);
  world.config.ddp = true;
  run_virtual_world(2 * pipeline, world, [&](session& s) {
    distributed_model model{make_seeded<holder<Impl, submodule>>()};
    place_round_robin(model.state(), pipeline);
    auto train_step = step([&](Tensor input) {
      auto loss = model(input);
      model.backward(loss);
      return loss;
    });
    auto rank = static_cast<size_t>(s.rank());
    try {
      train_step(batches().at(same_samples || rank == 0 ? 0 : 1));
    } catch (const error& e) {
      result[rank] = e.what();
    }
  });
  return result;
}

} // namespace

TEST_CASE("replicas that change a parameter differently are told so",
          "[runtime][replicas]") {
  auto pipeline = GENERATE(1u, 2u);
  CAPTURE(pipeline);
  for (auto& x : train_replicas<own_weight>(pipeline, false))
    CHECK_THAT(x, ContainsSubstring("parameter 'middle.weight'")
                    && ContainsSubstring("keep what forward changes in a "
                                         "buffer"));
  for (auto& x : train_replicas<own_weight>(pipeline, true))
    CHECK(x == "");
}

namespace {

/// An embedding that limits norms and counts its indices, of which no code
/// outside reads the weight, so that ranks can share it.
template <template <class> class P>
struct limited : torch::nn::Module {
  limited() {
    auto how = torch::nn::EmbeddingOptions(11, width);
    table = P<Embedding>(how.max_norm(1.0).scale_grad_by_freq(true));
    register_module("table", table), register_module("fc", fc);
  }
  Tensor forward(Tensor x) {
    auto tokens = (x.abs() * 10).to(torch::kLong) % 11;
    return torch::tanh(fc(table(tokens).mean(1))).square().mean();
  }
  P<Embedding> table{nullptr};
  P<Linear> fc{width, width};
};

template <class H>
using as_it_is = H;

/// Pairs of replicas share the table; each replica has its part of each batch.
/// @returns the table and the gradient of it in each step
/// @param errors by rank
std::vector<Tensor> train_shared(uint64_t replicas, bool automatic,
                                 std::vector<std::string>& errors) {
  std::vector<Tensor> result;
  errors.resize(replicas);
  std::mutex mutex;
  model_options x;
  x.ranks = 1;
  x.microbatches = 2;
  x.fast = std::nullopt;
  auto world = model_world(x);
  world.config.ddp = true;
  world.config.tensor_parallel_degree = 2;
  world.config.tensor_parallel_modules = {"table"};
  world.config.auto_partition = automatic;
  run_virtual_world(replicas, world, [&](session& s) {
    distributed_model model{make_seeded<holder<limited, submodule>>()};
    auto train_step = step([&](Tensor input) {
      auto loss = model(input);
      model.backward(loss);
      return loss;
    });
    for (auto& batch : batches()) {
      try {
        train_step(batch.chunk(static_cast<int64_t>(replicas)).at(data_rank()));
      } catch (const error& e) {
        errors[static_cast<size_t>(s.rank())] = e.what();
        return;
      }
      auto gradients = model.gradients();
      auto state = model.state_dict();
      at::NoGradGuard no_grad;
      for (auto& p : model.local_parameters())
        if (p.grad().defined())
          p.add_(p.grad(), 5.0), p.mutable_grad() = Tensor{};
      std::unique_lock guard{mutex};
      if (s.rank() == 0)
        result.push_back(state.front().second),
          result.push_back(gradients.front().second);
    }
  });
  return result;
}

/// The same in one process: the gradient of a microbatch is the mean over
/// halves, each of which counts its own indices.
std::vector<Tensor> train_limited() {
  std::vector<Tensor> result;
  auto model = make_seeded<holder<limited, as_it_is>>();
  for (auto& batch : batches()) {
    for (auto& half : batch.chunk(2))
      for (auto& part : half.chunk(2))
        (model->forward(part) / 4).backward();
    auto parameters = model->named_parameters();
    result.push_back(parameters["table.weight"].detach().clone());
    result.push_back(parameters["table.weight"].grad().clone());
    at::NoGradGuard no_grad;
    for (auto& p : model->parameters())
      p.add_(p.grad(), 5.0), p.mutable_grad() = Tensor{};
  }
  return result;
}

} // namespace

TEST_CASE("replicas that share an embedding limit its norms together",
          "[runtime][tensor_parallel][replicas][R19]") {
  auto automatic = GENERATE(true, false);
  CAPTURE(automatic);
  auto expected = train_limited();
  std::vector<std::string> errors;
  auto found = train_shared(2, automatic, errors);
  REQUIRE(found.size() == expected.size());
  for (size_t i = 0; i < found.size(); ++i) {
    CAPTURE(i);
    check_near(found[i], expected[i]);
  }
  train_shared(4, automatic, errors); // two pairs have other samples
  for (auto& x : errors)
    CHECK_THAT(x, ContainsSubstring("parameter 'table.weight'"));
}
