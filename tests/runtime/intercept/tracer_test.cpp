#include "tests/support/catch.hpp"

#include "runtime/step/model_state.hpp"
#include "tests/support/torch/training_step.hpp"
#include "tests/support/torch/two_ranks.hpp"

#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/utils.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <sstream>
#include <string>

using Catch::Matchers::ContainsSubstring;
using namespace smp;
using namespace smp::test;

namespace {

virtual_world_options automatic_world(uint64_t ranks = 2,
                                      uint64_t microbatches = 2) {
  auto result = manual_world(ranks, microbatches);
  result.config.auto_partition = true;
  return result;
}

/// A model of any code over four intercepted layers.
struct layers_impl : torch::nn::Module {
  using code = std::function<Tensor(layers_impl&, Tensor)>;

  explicit layers_impl(code f) : f(std::move(f)) {
    register_module("last", last);
    register_module("twice", twice);
    register_module("first", first);
    register_module("never", never);
  }

  Tensor forward(Tensor x) {
    return f(*this, std::move(x));
  }

  submodule<torch::nn::Linear> last{8, 8};
  submodule<torch::nn::Linear> twice{8, 8};
  submodule<torch::nn::Linear> first{8, 8};
  submodule<torch::nn::Linear> never{8, 8};
  code f;
};
TORCH_MODULE_IMPL(layers, layers_impl);

/// A module that returns what another one returned.
struct wrapper_impl : torch::nn::Module {
  wrapper_impl() {
    register_module("inner", inner);
  }

  Tensor forward(Tensor x) {
    return inner(x);
  }

  submodule<torch::nn::Linear> inner{8, 8};
};
TORCH_MODULE_IMPL(wrapper, wrapper_impl);

struct nested_impl : torch::nn::Module {
  nested_impl() {
    register_module("outer", outer);
  }

  Tensor forward(Tensor x) {
    return outer(x).relu();
  }

  submodule<wrapper> outer{};
};
TORCH_MODULE_IMPL(nested, nested_impl);

Tensor chain(layers_impl& m, Tensor x) {
  return m.last(m.twice(m.twice(m.first(x))));
}

void keep_busy(std::chrono::microseconds x) {
  using clock = std::chrono::steady_clock;
  for (auto end = clock::now() + x; clock::now() < end;)
    ;
}

/// What ranks know after one step.
struct traced_step {
  std::vector<std::string> texts; // by rank
  std::optional<partition_decision> decision;
  std::map<std::string, Tensor> state;
  std::map<std::string, Tensor> gradients;
  Tensor loss;
};

template <class Make>
traced_step run(const virtual_world_options& world, Make make, Tensor x) {
  traced_step result;
  auto ranks = world.config.pipeline_parallel_degree;
  result.texts.resize(ranks);
  std::mutex mutex;
  run_virtual_world(ranks, world, [&](session& s) {
    distributed_model model{seeded(make)};
    auto train_step = training_step(model, mean_square_of);
    auto loss = train_step(x).reduce_mean();
    auto state = model.state_dict();
    auto gradients = model.gradients();
    std::unique_lock guard{mutex};
    result.texts[s.rank()] = model.partition_text();
    if (auto* decision = model.state().decision()) {
      if (result.decision)
        throw std::runtime_error{"not only pp_rank 0 decides"};
      result.decision = *decision;
      result.state = {state.begin(), state.end()};
      result.gradients = {gradients.begin(), gradients.end()};
      result.loss = loss;
    }
  });
  return result;
}

const module_info& module_called(const traced_step& x,
                                 const std::string& path) {
  for (auto& m : x.decision->model)
    if (m.path == path)
      return m;
  throw std::runtime_error{"no module " + path};
}

/// Uses everything that a trace could leave behind: random numbers, batch
/// statistics, a weight that forward writes to, and an input that it changes.
struct stateful_impl : torch::nn::Module {
  stateful_impl() {
    register_module("embedding", embedding);
    register_module("layers", layers);
  }

  Tensor forward(Tensor x) {
    auto tokens = x.clone();
    x.add_(100); // no tokens any more
    return layers->forward(embedding(tokens).flatten(0, 1));
  }

  submodule<torch::nn::Embedding> embedding{
    torch::nn::EmbeddingOptions(16, 8).max_norm(0.5)};
  torch::nn::Sequential layers{torch::nn::Linear(8, 8), torch::nn::Dropout(0.5),
                               torch::nn::BatchNorm1d(8),
                               torch::nn::Linear(8, 8)};
};
TORCH_MODULE_IMPL(stateful, stateful_impl);

struct lister_impl : torch::nn::Module {
  std::vector<Tensor> forward(Tensor x) {
    return {x + 1, x * 2};
  }
};
TORCH_MODULE_IMPL(lister, lister_impl);

struct writer_impl : torch::nn::Module {
  Tensor forward(Tensor x) {
    x.add_(1);
    return x * 2;
  }
};
TORCH_MODULE_IMPL(writer, writer_impl);

struct echo_impl : torch::nn::Module {
  Tensor forward(Tensor x) {
    return x;
  }
};
TORCH_MODULE_IMPL(echo, echo_impl);

/// Has a buffer that no call changes.
struct scaler_impl : torch::nn::Module {
  scaler_impl() {
    scale = register_buffer("scale", torch::full({8}, 0.5));
  }

  Tensor forward(Tensor x) {
    return x * scale;
  }

  Tensor scale;
};
TORCH_MODULE_IMPL(scaler, scaler_impl);

/// Its code does nothing with results, but calls of some modules wait.
struct waiting_impl : torch::nn::Module {
  waiting_impl() {
    register_module("plain", plain);
    register_module("lists", lists);
    register_module("writes", writes);
    register_module("echoes", echoes);
    register_module("norm", norm);
    register_module("scales", scales);
  }

  Tensor forward(Tensor x) {
    auto both = lists(plain(x));
    writes(both[1]);
    return scales(norm(echoes(both[0])));
  }

  submodule<torch::nn::Linear> plain{8, 8};
  submodule<lister> lists{};
  submodule<writer> writes{};
  submodule<echo> echoes{};
  submodule<torch::nn::BatchNorm1d> norm{8};
  submodule<scaler> scales{};
};
TORCH_MODULE_IMPL(waiting, waiting_impl);

} // namespace

TEST_CASE("the first step measures what modules cost", "[runtime][trace]") {
  auto x = run(
    automatic_world(), [] { return layers{chain}; }, torch::ones({6, 8}));
  CHECK_THAT(x.texts[0],
             ContainsSubstring("time and memory measured on the CPU"));
  CHECK_THAT(x.texts[1],
             ContainsSubstring("time and memory measured on the CPU"));
  REQUIRE(x.decision);
  auto& root = x.decision->model[0];
  REQUIRE(root.children.size() == 4);
  std::vector<std::string> order;
  for (auto child : root.children)
    order.push_back(x.decision->model[child.value].path);
  // As executed; what never ran stays behind its neighbour in the code.
  CHECK(order == std::vector<std::string>{"first", "never", "twice", "last"});
  // A microbatch has three rows of eight floats.
  constexpr uint64_t rows = 3 * 8 * 4;
  auto& first = module_called(x, "first");
  CHECK(first.call_bytes == 2 * rows);
  CHECK(first.calls == 1);
  CHECK(first.activations == 3 * 8); // elements: the output
  CHECK(*first.compute > 0);
  auto& twice = module_called(x, "twice");
  CHECK(twice.call_bytes == 2 * rows);
  CHECK(twice.calls == 2);
  CHECK(twice.activations == 2 * 3 * 8);
  CHECK(x.decision->plan.options.step_seconds > 0);
  CHECK(x.decision->plan.options.crossing.request > 0);
  CHECK_THAT(x.texts[0], ContainsSubstring("did not call module never"));
}

TEST_CASE("a trace shows what callers do with results", "[runtime][trace]") {
  auto traced = [](const layers_impl::code& code) {
    auto x = run(
      automatic_world(), [&] { return layers{code}; }, torch::ones({4, 8}));
    std::string result;
    for (auto& m : x.decision->model) {
      if (m.waited_for)
        result += m.path + " waited for; ";
      for (auto other : m.added_to)
        result += m.path + " added to " + x.decision->model[other.value].path
                  + "; ";
    }
    return result;
  };
  CHECK(traced(chain).empty());
  CHECK(traced([](layers_impl& m, Tensor x) {
          return m.last(m.twice(m.first(x).relu()));
        })
        == "first waited for; ");
  CHECK(traced([](layers_impl& m, Tensor x) {
          auto y = m.first(x);
          y.mul_(2);
          return m.last(m.twice(y));
        })
        == "first waited for; ");
  // While the next call runs it may wait.
  CHECK(traced([](layers_impl& m, Tensor x) {
          auto y = m.first(x);
          auto z = m.twice(y);
          auto unused = y.relu();
          return m.last(z);
        }).empty());
  // A sum of results is made where they are.
  CHECK(traced([](layers_impl& m, Tensor x) {
          auto y = m.first(x);
          return m.last(y + m.twice(y));
        })
        == "twice added to first; ");
  CHECK(traced([](layers_impl& m, Tensor x) {
          auto y = m.first(x);
          return m.last((y + m.twice(y)).relu());
        })
        == "twice waited for; twice added to first; ");
  CHECK(traced([](layers_impl& m, Tensor x) {
          return m.last(m.twice(m.first(x))).relu();
        })
        == "last waited for; ");
}

TEST_CASE("a result that a module passes on is known by both of its names",
          "[runtime][trace]") {
  auto x = run(
    automatic_world(), [] { return nested{}; }, torch::ones({4, 8}));
  CHECK(module_called(x, "outer").waited_for);
  CHECK_FALSE(module_called(x, "outer").passed_on);
  CHECK(module_called(x, "outer.inner").waited_for);
  CHECK(module_called(x, "outer.inner").passed_on);
}

TEST_CASE("a trace shows which calls wait whatever their callers do",
          "[runtime][trace]") {
  auto make = [] {
    waiting model;
    set_partition(*model->plain, 1);
    set_partition(*model->lists, 0);
    set_partition(*model->writes, 0);
    set_partition(*model->echoes, 0);
    set_partition(*model->norm, 0);
    set_partition(*model->scales, 0);
    return model;
  };
  auto x = run(automatic_world(), make,
               torch::arange(64.0).view({8, 8}).remainder(7));
  std::string waited;
  std::string state;
  for (auto& m : x.decision->model) {
    waited += m.waited_for ? m.path + " " : "";
    state += m.keeps_state ? m.path + " " : "";
  }
  CHECK(waited == "lists writes echoes ");
  CHECK(state == "norm ");
}

TEST_CASE("a trace changes neither numbers nor state", "[runtime][trace]") {
  auto make = [] { return stateful{}; };
  auto run_with = [&](uint64_t ranks, const char* device) {
    auto world = automatic_world(ranks, 2);
    world.config.trace_device = device;
    return run(world, make, torch::arange(8).view({4, 2}).clone());
  };
  auto traced = run_with(2, "cpu");
  auto untraced = run_with(1, "none");
  auto single = run_with(1, "cpu");
  CHECK_THAT(traced.texts[0], ContainsSubstring("measured on the CPU"));
  CHECK_THAT(traced.texts[0], !ContainsSubstring("cannot be traced"));
  CHECK(traced.loss.equal(untraced.loss));
  CHECK(traced.loss.equal(single.loss));
  REQUIRE(traced.state.size() == untraced.state.size());
  for (auto& [name, x] : traced.state) {
    INFO(name);
    CHECK(x.equal(untraced.state.at(name)));
    CHECK(x.equal(single.state.at(name)));
  }
  for (auto& [name, x] : traced.gradients) {
    INFO(name);
    CHECK(torch::allclose(x, single.gradients.at(name)));
  }
}

TEST_CASE("only the forward part of a body runs for a trace",
          "[runtime][trace]") {
  std::atomic<int> before = 0, after = 0;
  std::array<double, 2> sums{}; // by rank
  double left = -1;
  auto world = automatic_world(2, 4);
  run_virtual_world(2, world, [&](session&) {
    distributed_model model{seeded([] { return layers{chain}; })};
    auto train_step = step([&](Tensor y) {
      ++before;
      auto z = y.clone();
      y.add_(1); // of a copy, when it is for the trace
      auto loss = model(z).sum();
      model.backward(loss);
      ++after;
      return y.sum();
    });
    auto x = torch::zeros({4, 8});
    sums.at(pp_rank()) = train_step(x).reduce_sum().item<double>();
    if (pp_rank() == 0)
      left = x.sum().item<double>();
    train_step(x);
  });
  CHECK(sums == std::array{32.0, 32.0});
  CHECK(left == 32);
  CHECK(before >= 4 + 1 + 4); // on a slow machine the trace repeats it
  CHECK(after == 4 + 4);
}

TEST_CASE("a body that only evaluates is traced as well", "[runtime][trace]") {
  auto world = automatic_world();
  std::array<int64_t, 2> sizes{}; // by rank
  std::array<std::string, 2> texts;
  run_virtual_world(2, world, [&](session& s) {
    distributed_model model{seeded([] { return layers{chain}; })};
    auto evaluate = step([&](Tensor y) {
      at::NoGradGuard no_grad;
      return model(y).repeat({64, 64}); // too large to travel
    });
    sizes.at(s.rank()) = evaluate(torch::ones({4, 8})).concat().size(0);
    texts.at(s.rank()) = model.partition_text();
  });
  CHECK(sizes == std::array<int64_t, 2>{4 * 64, 4 * 64});
  for (auto& text : texts)
    CHECK_THAT(text, ContainsSubstring("measured on"));
}

TEST_CASE("a body that was slow the one time it ran decides nothing",
          "[runtime][trace]") {
  std::array<std::string, 2> texts; // by rank
  run_virtual_world(2, automatic_world(), [&](session& s) {
    distributed_model model{seeded([] { return layers{chain}; })};
    auto run = step([&](Tensor y) {
      keep_busy(std::chrono::milliseconds{5}); // as if the machine were
      return model(y).sum();
    });
    run(torch::ones({4, 8}));
    texts.at(s.rank()) = model.partition_text();
  });
  for (auto& text : texts)
    CHECK_THAT(text,
               ContainsSubstring("is noise, so each call counts the same"));
}

namespace {

/// Takes long enough to count, and as long as others of its kind.
struct busy_impl : torch::nn::Module {
  Tensor forward(Tensor x) {
    keep_busy(std::chrono::microseconds{30});
    return x * weight;
  }

  Tensor weight = register_parameter("weight", torch::ones({1}));
};
TORCH_MODULE_IMPL(busy, busy_impl);

struct busy_too_impl : busy_impl {};
TORCH_MODULE_IMPL(busy_too, busy_too_impl);

/// Modules of one kind, then as many of another. Modules of a kind have one
/// time, the median: wherever the work is halved, two percent more of one kind
/// and less of the other move that by some modules, whatever the noise.
struct two_kinds_impl : torch::nn::Module {
  two_kinds_impl() {
    for (int i = 0; i < 100; ++i)
      layers->push_back(busy{});
    for (int i = 0; i < 100; ++i)
      layers->push_back(busy_too{});
    register_module("layers", layers);
  }

  Tensor forward(Tensor x) {
    return layers->forward(x);
  }

  torch::nn::Sequential layers;
};
TORCH_MODULE_IMPL(two_kinds, two_kinds_impl);

} // namespace

TEST_CASE("what a body does once to get ready is not its time",
          "[runtime][trace]") {
  auto world = automatic_world();
  world.config.memory_weight = 0;
  std::string text;
  run_virtual_world(2, world, [&](session&) {
    distributed_model model{seeded([] { return two_kinds{}; })};
    std::atomic<bool> first{true};
    auto run = step([&](Tensor y) {
      if (first.exchange(false))
        keep_busy(std::chrono::milliseconds{100});
      return model(y).sum();
    });
    run(torch::ones({4, 8}));
    if (pp_rank() == 0)
      text = model.partition_text();
  });
  CHECK_THAT(text, ContainsSubstring("largest load 5"));
}

TEST_CASE("a decision that errors of measured times would change says so",
          "[runtime][trace]") {
  auto world = automatic_world(2, 1);
  world.config.strategy = "paper"; // whatever a call of another rank costs
  world.config.memory_weight = 0;
  auto x = run(
    world, [] { return two_kinds{}; }, torch::ones({2, 8}));
  REQUIRE(x.decision);
  auto& devices = x.decision->plan.module_device;
  REQUIRE(std::ranges::count(devices, 1u) > 0);
  auto& reasons = x.decision->plan.reasons;
  REQUIRE_FALSE(reasons.empty());
  CHECK_THAT(reasons[0],
             ContainsSubstring("the decision depends on noise: with times "
                               "2 % off, ")
               && ContainsSubstring("would be elsewhere"));
  for (auto& text : x.texts) {
    std::istringstream words{text}; // its lines are broken anywhere
    std::string line;
    for (std::string word; words >> word;)
      line += word + " ";
    CHECK_THAT(line, ContainsSubstring("the decision depends on noise: with "));
  }
}

TEST_CASE("a module that cannot be traced is named and does not stop the run",
          "[runtime][trace]") {
  auto code = [](layers_impl& m, Tensor x) {
    x = m.first(x);
    TORCH_CHECK(at::GradMode::is_enabled(), "wants gradients");
    return m.last(x);
  };
  auto x = run(
    automatic_world(), [&] { return layers{code}; }, torch::ones({6, 8}));
  CHECK(x.gradients.size() == 4); // of two layers
  CHECK_THAT(x.texts[0],
             ContainsSubstring("the step cannot be traced to its end (wants "
                               "gradients)"));
  CHECK_THAT(x.texts[1],
             ContainsSubstring("time and memory measured on the CPU"));
}

TEST_CASE("a trace on a GPU that is not there is an error on all ranks",
          "[runtime][trace]") {
  if (at::hasCUDA())
    SKIP("there is one");
  auto world = automatic_world();
  world.config.trace_device = "gpu";
  std::atomic<int> failed = 0;
  run_virtual_world(2, world, [&](session&) {
    distributed_model model{seeded([] { return layers{chain}; })};
    auto train_step = step([&](Tensor y) { return model(y).sum(); });
    std::string text;
    try {
      train_step(torch::ones({4, 8}));
    } catch (const error& err) {
      failed += err.code() == error_code::config;
      text = err.what();
    }
    if (text.find("smp.trace_device = \"gpu\", but there is no GPU")
        == std::string::npos)
      throw std::runtime_error{"wrong error: " + text};
  });
  CHECK(failed == 2);
}

TEST_CASE("a partition before the first step says what it is based on",
          "[runtime][trace]") {
  run_virtual_world(2, automatic_world(), [&](session&) {
    distributed_model model{seeded([] { return layers{chain}; })};
    model.partition();
    if (model.partition_text().find(
          "costs: guessed from sizes: partitioned before the first step")
        == std::string::npos)
      throw std::runtime_error{model.partition_text()};
    if (model.partition_text(true).find("\x1b[") == std::string::npos)
      throw std::runtime_error{"no colours"};
  });
}

// -- manual placement ---------------------------------------------------------

TEST_CASE("what is placed by hand stays there, the rest is placed by cost",
          "[runtime][manual]") {
  auto automatic = GENERATE(true, false);
  auto world = automatic_world();
  world.config.auto_partition = automatic;
  world.config.default_partition = automatic ? 0 : 1;
  auto plain = [] { return layers{chain}; };
  auto make = [] {
    layers model{chain};
    set_partition(*model->first, 1);
    set_partition(*model->last, 0);
    return model;
  };
  auto x = run(world, make, torch::ones({6, 8}));
  auto single = run(automatic_world(1), plain, torch::ones({6, 8}));
  auto device = [&](const std::string& path) {
    for (size_t i = 0; i < x.decision->model.size(); ++i)
      if (x.decision->model[i].path == path)
        return x.decision->plan.module_device[i];
    return ~0u;
  };
  CHECK(device("first") == 1);
  CHECK(device("last") == 0);
  if (!automatic) {
    CHECK(device("twice") == 1);
    CHECK(device("never") == 1);
    CHECK_THAT(x.texts[0], ContainsSubstring("placed by hand"));
  }
  CHECK(torch::allclose(x.loss, single.loss));
  for (auto& [name, y] : x.gradients)
    CHECK(torch::allclose(y, single.gradients.at(name)));
}
