#include "tests/support/catch.hpp"

#include "runtime/train/models/gpt.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/torch/near.hpp"
#include "tests/support/torch/two_ranks.hpp"

#include <torch/nn/functional/linear.h>
#include <torch/nn/modules/linear.h>
#include <torch/utils.h>

#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

// What tensor-parallel ranks cannot share, and what they may not do with what
// they share: right numbers, or one clear error.

using namespace smp;
using namespace smp::test;
using Catch::Matchers::ContainsSubstring;

namespace {

namespace F = torch::nn::functional;

constexpr int64_t width = 8;

session_config sharing(uint64_t peers = 2) {
  session_config x;
  x.tensor_parallel_degree = peers;
  x.tensor_parallel_modules = {"*"};
  x.ddp = true;
  x.microbatches = 2;
  x.threads = 1;
  return x;
}

/// A Linear of one's own with a parameter more, or of other shapes.
struct odd_linear_impl : torch::nn::Module {
  odd_linear_impl(Tensor weight, Tensor bias, Tensor scale)
    : weight(register_parameter("weight", weight)),
      bias(register_parameter("bias", bias)) {
    if (scale.defined())
      this->scale = register_parameter("scale", scale);
  }

  Tensor forward(Tensor x) {
    auto y = weight.dim() == 2 ? F::linear(x, weight) : x * weight;
    y = y + bias;
    return scale.defined() ? y * scale : y;
  }

  Tensor weight, bias, scale;
};
TORCH_MODULE_IMPL(odd_linear, odd_linear_impl);

[[maybe_unused]] const bool is_registered = tp_register<odd_linear_impl>(
  "Linear");

/// Any code over shared modules.
template <template <class> class P>
struct coded_impl : torch::nn::Module {
  using code = std::function<Tensor(coded_impl&, Tensor)>;

  explicit coded_impl(code f) : f(std::move(f)) {
    register_module("up", up);
    register_module("down", down);
  }

  Tensor forward(Tensor x) {
    return f(*this, x);
  }

  P<torch::nn::Linear> up{width, width}, down{width, width};
  code f;
};

struct shared_impl : coded_impl<submodule> {
  using coded_impl<submodule>::coded_impl;
};
TORCH_MODULE_IMPL(shared, shared_impl);

template <class F>
auto alone_and_shared(F f) {
  return std::pair{coded_impl<as_is>::code{f}, shared_impl::code{f}};
}

Tensor data(int64_t rows) {
  return torch::sin(torch::arange(rows * width).view({rows, width}) + 1.0);
}

using numbers = std::map<std::string, Tensor>;

struct outcome {
  std::vector<std::string> errors; // of all ranks
  numbers gradients;
  std::vector<Tensor> results; // by dp_rank
  std::string text;
  uint64_t requests = 0; // in the last step, of all ranks
};

/// One step of as many peers as share, each with its rows of the data.
template <class Make, class Step>
outcome run(const session_config& config, Make make, Step body) {
  outcome result;
  auto peers = config.tensor_parallel_degree;
  auto ranks = peers * config.pipeline_parallel_degree;
  result.results.resize(peers);
  std::mutex mutex;
  virtual_world_options world;
  world.config = config;
  world.reorder = true;
  run_virtual_world(ranks, world, [&](session& s) {
    try {
      distributed_model model{seeded(make)};
      model.partition();
      if (s.rank() == 0)
        result.text = model.partition_text();
      auto mine = body(model);
      auto gradients = model.gradients();
      std::unique_lock guard{mutex};
      if (s.pp_rank() == 0)
        result.results[dp_rank()] = mine;
      result.requests += s.last_step().requests;
      if (s.rank() == 0)
        result.gradients = {gradients.begin(), gradients.end()};
    } catch (const error& e) {
      std::unique_lock guard{mutex};
      result.errors.push_back(e.what());
    }
  });
  return result;
}

/// A training step on 4 rows for each rank.
auto trains(uint64_t peers = 2) {
  return [peers](auto& model) {
    auto train_step = step([&](Tensor x) {
      auto y = model(x);
      model.backward(y.square().mean());
      return y.detach();
    });
    auto mine = data(static_cast<int64_t>(4 * peers))
                  .chunk(static_cast<int64_t>(peers))
                  .at(dp_rank());
    return train_step(mine).concat();
  };
}

double largest(const Tensor& x) {
  return x.abs().max().item<double>();
}

/// @param model computes alone what was shared by 2
template <class M>
void check_same(M& model, const outcome& x) {
  REQUIRE(x.errors == std::vector<std::string>{});
  std::vector<Tensor> ys;
  for (auto& part : data(8).chunk(4)) {
    ys.push_back(model.forward(part));
    (ys.back().square().mean() / 4).backward();
  }
  check_near(torch::cat(x.results), torch::cat(ys));
  // Of parameters under two names, one.
  REQUIRE_FALSE(x.gradients.empty());
  for (auto& p : model.named_parameters()) {
    INFO(p.key());
    auto found = x.gradients.find(p.key());
    if (found != x.gradients.end() && p.value().grad().defined())
      check_near(found->second, p.value().grad());
    else if (found != x.gradients.end())
      CHECK(largest(found->second) == 0);
  }
}

} // namespace

// -- what is not shared -------------------------------------------------------

TEST_CASE("a layer whose heads cannot be divided is shared by its linears",
          "[runtime][tensor_parallel]") {
  model_sizes sizes;
  sizes.width = 12;
  sizes.heads = 3;
  sizes.layers = 1;
  auto config = sharing();
  config.tensor_parallel_modules = {"transformer.h.*"};
  auto x = run(
    config, [&] { return gpt{sizes}; }, [](auto&) { return Tensor{}; });
  CHECK(x.errors == std::vector<std::string>{});
  CHECK_THAT(x.text,
             ContainsSubstring("TransformerLayer not shared, as its 3 heads "
                               "cannot be divided among 2 ranks; 2 or 4 could "
                               "(its linears may be): transformer.h.0")
               && ContainsSubstring("Conv1D shared by 2 ranks: "));
}

TEST_CASE(
  "a registered module with other parameters is not shared, and "
  "computes what it did",
  "[runtime][tensor_parallel]") {
  auto make = [](int which) {
    return [which] {
      auto w = torch::randn({width, width});
      auto b = torch::randn({width});
      torch::nn::Sequential result;
      result->push_back(
        "odd", which == 0   ? odd_linear(w, b, torch::full({width}, 2.0))
               : which == 1 ? odd_linear(b, b.clone(), Tensor{})
                            : odd_linear(w, torch::randn({1}), Tensor{}));
      result->push_back("fc", torch::nn::Linear(width, width));
      return result;
    };
  };
  auto which = GENERATE(0, 1, 2);
  CAPTURE(which);
  auto x = run(sharing(), make(which), trains());
  const std::string why[] = {
    "it has a parameter 'scale' that no Linear has; register its class with "
    "a distributed module of its own",
    "its weight is [8]; it has to have two axes",
    "its bias is [1]; it has to be [8]"};
  CHECK_THAT(x.text,
             ContainsSubstring("Linear not shared, as " + why[which] + ": odd")
               && ContainsSubstring("Linear shared by 2 ranks: fc"));
  auto model = seeded(make(which));
  struct {
    torch::nn::Sequential inner;
    Tensor forward(Tensor y) {
      return inner->forward(y);
    }
    auto named_parameters() {
      return inner->named_parameters();
    }
  } plain{model};
  check_same(plain, x);
}

TEST_CASE("there are no other distributed modules than there are",
          "[runtime][tensor_parallel]") {
  CHECK_THAT(error_of([] { tp_register<odd_linear_impl>("Bilinear"); }),
             ContainsSubstring("\"Bilinear\"")
               && ContainsSubstring("Conv1D, Embedding, LayerNorm, Linear"));
}

TEST_CASE("a module under two names is shared once",
          "[runtime][tensor_parallel]") {
  struct twice_impl : torch::nn::Module {
    twice_impl() {
      register_module("a", fc);
      register_module("b", fc);
    }
    Tensor forward(Tensor x) {
      return fc(fc(x));
    }
    submodule<torch::nn::Linear> fc{width, width};
  };
  using twice = torch::nn::ModuleHolder<twice_impl>;
  auto x = run(
    sharing(), [] { return twice{std::make_shared<twice_impl>()}; }, trains());
  auto model = seeded([] { return std::make_shared<twice_impl>(); });
  INFO(x.text);
  check_same(*model, x);
}

// -- gradients that are off ---------------------------------------------------

TEST_CASE("shared modules without grad compute what they do with it",
          "[runtime][tensor_parallel]") {
  auto [alone, shared_code] = alone_and_shared([](auto& m, Tensor x) {
    Tensor y;
    {
      at::NoGradGuard no_grad;
      y = m.up(x);
    }
    return m.down(y + x);
  });
  auto config = sharing();
  config.pipeline_parallel_degree = GENERATE(1u, 2u);
  config.trace_device = "none"; // measured, all may stay on one rank
  auto x = run(
    config, [&] { return shared{shared_code}; }, trains());
  CHECK((x.requests > 0) == (config.pipeline_parallel_degree > 1));
  auto model = seeded([&] { return coded_impl<as_is>{alone}; });
  check_same(model, x);
}

TEST_CASE("a step without grad evaluates shared modules",
          "[runtime][tensor_parallel]") {
  auto [alone, shared_code] = alone_and_shared(
    [](auto& m, Tensor x) { return m.down(torch::tanh(m.up(x))); });
  auto x = run(
    sharing(), [&] { return shared{shared_code}; },
    [](auto& model) {
      auto eval_step = step([&](Tensor x) { return model(x); });
      at::NoGradGuard no_grad;
      auto first = eval_step(data(8).chunk(2).at(dp_rank())).concat();
      model->eval();
      auto second = eval_step(data(8).chunk(2).at(dp_rank())).concat();
      return torch::equal(first, second) ? second : Tensor{};
    });
  REQUIRE(x.errors == std::vector<std::string>{});
  auto model = seeded([&] { return coded_impl<as_is>{alone}; });
  check_near(torch::cat(x.results), model.forward(data(8)).detach());
}

TEST_CASE("peers of which one has no grad get an error",
          "[runtime][tensor_parallel][R31]") {
  auto x = run(
    sharing(),
    [] {
      return shared{[](auto& m, Tensor x) {
        at::AutoGradMode grad{tp_rank() == 0};
        auto y = m.up(x);
        at::AutoGradMode again{true};
        return m.down(y);
      }};
    },
    trains());
  REQUIRE(x.errors.size() == 2);
  for (auto& e : x.errors)
    CHECK_THAT(e, ContainsSubstring("'down', backward, was called once by "
                                    "ranks 0 and 1, but not in the same way"));
}

// -- batches ------------------------------------------------------------------

TEST_CASE("peers with batches of different sizes get an error that says so",
          "[runtime][tensor_parallel]") {
  auto x = run(
    sharing(),
    [] { return shared{[](auto& m, Tensor x) { return m.down(m.up(x)); }}; },
    [](auto& model) {
      auto train_step = step([&](Tensor x) {
        auto y = model(x).square().mean();
        model.backward(y);
        return y;
      });
      // The last batch of a data set.
      auto rows = tp_rank() == 0 ? 4 : 2;
      try {
        train_step(data(rows));
      } catch (const error&) {
        // And the session goes on.
        train_step(data(4));
        throw;
      }
      return Tensor{};
    });
  REQUIRE(x.errors.size() == 2);
  for (auto& e : x.errors)
    CHECK_THAT(e, ContainsSubstring("need batches of the same sizes, but a "
                                    "microbatch has as tensor 0 float32[2, 8] "
                                    "on rank 0 and float32[1, 8] on rank 1"));
}
