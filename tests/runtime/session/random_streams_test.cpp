// ctest: seconds=50 label=proof
#include "tests/support/catch.hpp"

#include "runtime/config/config_file.hpp"
#include "runtime/train/trainable.hpp"
#include "tests/support/runs/program.hpp"
#include "tests/support/torch/equality.hpp"
#include "tests/support/torch/models.hpp"
#include "tests/support/torch/small_models.hpp"
#include "tests/support/torch/training_step.hpp"
#include "tests/support/torch/two_ranks.hpp"

#include <torch/csrc/autograd/custom_function.h>

#include <fmt/format.h>

// Random numbers are those of one process, wherever modules run, whoever waits
// and whatever runs before them (R23); and nobody waits for them.

using namespace smp;
using namespace smp::test;

namespace {

namespace ag = torch::autograd;

// -- models that draw ---------------------------------------------------------

/// Its own draws and those of a plain member are its own, whatever its parts
/// draw.
template <template <class> class P>
struct noisy : torch::nn::Module {
  noisy() {
    register_module("drop", drop);
    register_module("hidden", hidden);
    register_module("fc", fc);
  }
  Tensor forward(Tensor x) {
    auto y = hidden(fc(x)) + torch::randn({1, width}) * 0.1;
    y = drop(y);
    // Some microbatches draw more than others.
    if (x[0][0].template item<double>() > 0)
      y = y * (1 + torch::rand({1, width}));
    return torch::tanh(drop(y)) + torch::rand({1, width}) * 0.1;
  }
  P<Dropout> drop{0.3};
  Dropout hidden{0.2};
  P<Linear> fc{width, width};
};

/// Calls in every way that there is: modules in modules, the same one again,
/// one object under two names, a Sequential of which parts run elsewhere,
/// twice.
template <template <class> class P>
struct drawing : torch::nn::Module {
  using part = torch::nn::ModuleHolder<noisy<P>>;

  drawing() {
    Dropout drop{0.25}; // one object, twice
    for (int i = 0; i < 2; ++i) {
      layers->push_back(part{});
      layers->push_back(drop);
      layers->push_back(Linear{width, width});
    }
    register_module("first", first);
    register_module("again", again);
    register_module("layers", layers);
    register_module("head", head);
    register_module("other_name", again);
  }
  Tensor forward(Tensor x) {
    auto y = layers->forward(first(x)) + torch::rand({width});
    y = again(layers->forward(torch::tanh(y)));
    return head(first(again(y))).square().mean();
  }
  P<part> first;
  P<Dropout> again{0.4};
  torch::nn::Sequential layers;
  P<Linear> head{width, width};
};

std::vector<Tensor> batches(int count) {
  std::vector<Tensor> result;
  for (int i = 0; i < count; ++i) {
    auto x = torch::arange(8 * width).view({8, width});
    result.push_back(torch::sin(x * (i + 1) * 0.7 + i));
  }
  return result;
}

template <template <template <class> class> class Impl>
void check_everywhere() {
  for (auto& each : all_placements())
    for (auto fast : {false, true})
      for (auto replay : {false, true}) {
        auto x = each;
        x.fast = fast;
        x.replay = replay && x.ranks > 1;
        x.steps = 4;
        INFO(fmt::format("{} ranks, {} microbatches, {}{}{}", x.ranks,
                         x.microbatches, x.pipeline, fast ? ", fast" : "",
                         x.replay ? ", replayed" : ""));
        CHECK(differences<Impl>(x, batches(4)) == std::vector<std::string>{});
      }
}

} // namespace

TEST_CASE("calls of every kind draw what they draw in one process",
          "[runtime][streams][R23]") {
  check_everywhere<drawing>();
}

TEST_CASE("calls in calls on other ranks draw what they draw in one process",
          "[runtime][streams][R23]") {
  check_everywhere<nested>();
}

namespace {

constexpr const char* pipelines[] = {
  "simple", "interleaved", "1f1b", "interleaved_1f1b", "list", "actor"};

constexpr const char* modes[] = {"blocking",
                                 "fast",
                                 "static",
                                 "auto",
                                 "static+fast",
                                 "deterministic",
                                 "static+auto",
                                 "deterministic+auto",
                                 "deterministic+static",
                                 "deterministic+static+auto"};

virtual_world_options drawing_world(uint64_t pp, const std::string& pipeline,
                                    const std::string& mode) {
  virtual_world_options result;
  auto& x = result.config;
  x.pipeline_parallel_degree = pp;
  x.pipeline = pipeline;
  x.microbatches = 3;
  x.threads = 1;
  x.static_mode = mode.find("static") != std::string::npos;
  if (!mode.ends_with("auto"))
    x.fast_mode = mode.ends_with("fast");
  x.deterministic_server = mode.starts_with("deterministic");
  if (x.static_mode && !x.deterministic_server)
    x.static_steps = 1;
  if (pipeline == "interleaved_1f1b")
    x.chunks = 2;
  if (pipeline == "list")
    for (uint64_t i = 0; i < x.microbatches; ++i)
      for (auto what : {phase::forward, phase::backward})
        x.schedule.list.push_back({microbatch_id{(i + 1) % 3}, what});
  if (pipeline == "actor") {
    x.schedule.plugin = built_program("../lib/unusual_schedule.so");
    x.schedule.name = "unusual";
  }
  result.reorder = true;
  return result;
}

} // namespace

TEST_CASE("every schedule in every mode draws what one process draws",
          "[runtime][streams][equality][R23]") {
  auto pp = GENERATE(1u, 2u, 4u);
  auto pipeline = GENERATE(range(0, 6));
  auto mode = GENERATE(range(0, static_cast<int>(std::size(modes))));
  constexpr uint64_t microbatches = 3;
  // By turns; both with each schedule and mode.
  auto dropout = (pipeline + mode + (pp == 2)) % 2 == 0 ? 0.2 : 0.0;
  auto world = drawing_world(pp, pipelines[pipeline], modes[mode]);
  INFO(fmt::format("pp {} {} {} dropout {}", pp, pipelines[pipeline],
                   modes[mode], dropout));
  std::vector<step_numbers> steps;
  run_virtual_world(pp, world, [&](session& s) {
    auto mine = run_steps(s, microbatches, dropout);
    if (s.pp_rank() == 0)
      steps = std::move(mine);
  });
  CHECK(differences(steps, world.config.seed, microbatches, dropout)
        == std::vector<std::string>{});
}

// -- waits --------------------------------------------------------------------

namespace {

/// @returns how often both ranks waited in the last of some steps in fast mode
uint64_t waits_of(const std::string& model, double dropout) {
  train_config config;
  config.smp.seed = 3;
  config.model.type = model;
  config.model.layers = 4;
  config.model.heads = 2;
  config.model.width = 16;
  config.model.vocabulary = 32;
  config.model.dropout = dropout;
  config.data.type = "synthetic";
  config.data.sequence_length = 8;
  config.data.batch_size = 8;
  virtual_world_options world;
  world.config.pipeline_parallel_degree = 2;
  world.config.microbatches = 4;
  world.config.pipeline = "simple";
  world.config.trace_device = "none";
  world.config.threads = 1;
  world.config.fast_mode = true;
  std::atomic<uint64_t> waits = 0;
  std::atomic<uint64_t> requests = 0;
  run_virtual_world(2, world, [&](session& s) {
    auto whole = seeded([&] { return make_trainable(config); });
    auto data = make_data(config);
    auto distributed = whole->distribute();
    auto train_step = step([&](const batch& in) {
      auto loss = whole->loss(in);
      distributed->backward(loss);
      return loss.detach();
    });
    for (uint64_t i = 0; i < 4; ++i)
      train_step(data->training_batch(i));
    waits += s.last_step().waits;
    requests += s.last_step().requests;
  });
  CHECK(requests > 0);
  return waits;
}

} // namespace

TEST_CASE("nobody waits for dropout in fast mode",
          "[runtime][streams][fast][R23]") {
  auto model = GENERATE(as<std::string>{}, "bert", "t5", "gpt");
  CAPTURE(model);
  CHECK(waits_of(model, 0.2) == waits_of(model, 0.0));
}

// -- what a stream does not depend on -----------------------------------------

namespace {

/// Two modules on other ranks that draw, called in one order or the other.
struct two_noises_impl : torch::nn::Module {
  two_noises_impl() {
    auto noise = [](function_impl& self, Tensor x) {
      return x * self.weight + torch::rand({3});
    };
    for (uint32_t i = 0; i < 2; ++i) {
      partition_scope on_rank{i};
      parts.push_back(register_module("part" + std::to_string(i),
                                      submodule<function>(noise)));
    }
  }

  Tensor forward(Tensor x, bool turned) {
    auto& first = parts[turned ? 1 : 0];
    auto& second = parts[turned ? 0 : 1];
    auto a = first(x);
    auto b = second(x);
    return turned ? b - a : a - b;
  }

  std::vector<submodule<function>> parts;
};
TORCH_MODULE_IMPL(two_noises, two_noises_impl);

} // namespace

TEST_CASE("a stream does not depend on which other module is called before",
          "[runtime][streams][R23]") {
  std::vector<Tensor> seen;
  for (auto turned : {false, true}) {
    for (auto fast : {false, true}) {
      auto world = manual_world(2, 2);
      world.config.fast_mode = fast;
      run_virtual_world(2, world, [&](session& s) {
        distributed_model model{seeded([] { return two_noises{}; })};
        auto run = step([&](Tensor x) {
          auto y = model(x, turned);
          model.backward(y.sum());
          return y.detach();
        });
        for (int i = 0; i < 3; ++i) {
          auto y = run(torch::zeros({4, 3})).concat();
          if (s.rank() == 0)
            seen.push_back(y);
        }
      });
    }
  }
  REQUIRE(seen.size() == 12);
  for (size_t i = 3; i < seen.size(); ++i)
    CHECK(torch::equal(seen[i], seen[i % 3]));
  CHECK_FALSE(torch::equal(seen[0], seen[1]));
}

// -- checkpointing of activations ---------------------------------------------

namespace {

/// Computes `f` once more in backward instead of keeping what it computed.
struct checkpointed : ag::Function<checkpointed> {
  using code = std::function<Tensor(Tensor)>;

  static Tensor forward(ag::AutogradContext* ctx, Tensor x, const code* f) {
    ctx->save_for_backward({x});
    ctx->saved_data["code"] = reinterpret_cast<int64_t>(f);
    torch::NoGradGuard no_grad;
    return (*f)(x);
  }

  static ag::variable_list backward(ag::AutogradContext* ctx,
                                    ag::variable_list grads) {
    torch::AutoGradMode with_grad{true};
    auto x = ctx->get_saved_variables()[0].detach().requires_grad_();
    auto& f = *reinterpret_cast<const code*>(ctx->saved_data["code"].toInt());
    auto y = f(x);
    y.backward(grads[0]);
    return {x.grad(), {}};
  }
};

/// A block with modules of its rank that draw, which are called again.
struct dropping_impl : torch::nn::Module {
  explicit dropping_impl(bool again) : again(again) {
    register_module("drop", drop);
    register_module("fc", fc);
  }

  Tensor forward(Tensor x) {
    for (int i = 0; i < 3; ++i)
      x = again ? checkpointed::apply(x, &code) : code(x);
    return x;
  }

  bool again;
  submodule<Dropout> drop{0.5};
  submodule<Linear> fc{6, 6};
  checkpointed::code code = [this](Tensor x) {
    return drop(torch::tanh(fc(drop(x))));
  };
};
TORCH_MODULE_IMPL(dropping, dropping_impl);

struct two_droppings_impl : torch::nn::Module {
  two_droppings_impl(bool again, uint32_t ranks) {
    register_module("first", first);
    for (uint32_t i = 0; i < 3; ++i) {
      partition_scope on_rank{i % ranks};
      parts.push_back(register_module("part" + std::to_string(i),
                                      submodule<dropping>(again)));
    }
  }

  Tensor forward(Tensor x) {
    x = first(x);
    for (auto& part : parts)
      x = part(x);
    return (x + parts[1](x)).square().mean();
  }

  Linear first{width, width};
  std::vector<submodule<dropping>> parts;
};
TORCH_MODULE_IMPL(two_droppings, two_droppings_impl);

} // namespace

TEST_CASE("what backward computes again draws the same numbers again",
          "[runtime][streams][R23]") {
  std::map<std::string, Tensor> expected;
  for (auto again : {false, true})
    for (uint32_t ranks : {1, 2, 3})
      for (auto fast : {false, true}) {
        INFO(fmt::format("{} on {} ranks{}", again ? "again" : "once", ranks,
                         fast ? ", fast" : ""));
        auto world = manual_world(ranks, 2);
        world.config.fast_mode = fast;
        std::map<std::string, Tensor> found;
        run_virtual_world(ranks, world, [&](session& s) {
          distributed_model model{seeded([&] {
            return two_droppings{again, ranks};
          })};
          auto train_step = training_step(model);
          for (int i = 0; i < 3; ++i)
            train_step(batches(1)[0]);
          auto all = model.gradients();
          if (s.rank() == 0)
            found = {all.begin(), all.end()};
        });
        REQUIRE(found.size() == 8);
        if (expected.empty())
          expected = found;
        for (auto& [name, x] : found)
          CHECK(is_close(x, expected.at(name), 1e-5));
      }
}
