#include "tests/support/catch.hpp"

#include "tests/support/torch/models.hpp"
#include "tests/support/torch/small_models.hpp"
#include "tests/support/torch/two_ranks.hpp"

#include <atomic>

// R19: which modules are ordered, why, and for how long.

using namespace smp;
using namespace smp::test;

namespace {

struct masked_impl : torch::nn::Module {
  masked_impl() {
    register_buffer("mask", torch::ones({width}));
  }
  Tensor forward(Tensor x) {
    return x * buffers()[0];
  }
};
TORCH_MODULE_IMPL(masked, masked_impl);

struct two_kinds_impl : torch::nn::Module {
  two_kinds_impl() {
    register_module("mask", mask);
    register_module("norm", norm);
    register_module("never", never);
  }
  Tensor forward(Tensor x) {
    return norm(mask(x)).square().mean();
  }
  submodule<masked> mask{std::make_shared<hooked<masked_impl>>()};
  submodule<BatchNorm1d> norm{width}, never{width};
};
TORCH_MODULE_IMPL(two_kinds, two_kinds_impl);

/// Comes back to a module with state if it likes what it sees.
template <template <class> class P>
struct returning : torch::nn::Module {
  returning() {
    this->register_module("state", state);
    this->register_module("fc", fc);
  }
  Tensor forward(Tensor x) {
    auto y = fc(state(x));
    if (x[0][0].template item<double>() > 0)
      y = state(torch::tanh(y));
    return y.square().mean();
  }
  P<torch::nn::ModuleHolder<counter<P>>> state;
  P<Linear> fc{width, width};
};

/// Calls modules past their hooks: as their plain types. Microbatches come
/// there at different times.
template <template <class> class P>
struct past_hooks : torch::nn::Module {
  past_hooks() {
    this->register_module("fc", fc);
    this->register_module("state", state);
    this->register_module("norm", norm);
    this->register_module("head", head);
  }
  Tensor forward(Tensor x) {
    x = x[0][0].template item<double>() > 0 ? fc(fc(fc(x))) : fc(x);
    x = static_cast<torch::nn::BatchNorm1dImpl&>(*norm).forward(x);
    x = static_cast<counter<P>&>(*state).forward(torch::tanh(x));
    return static_cast<torch::nn::LinearImpl&>(*head)
      .forward(x)
      .square()
      .mean();
  }
  P<Linear> fc{width, width};
  P<torch::nn::ModuleHolder<counter<P>>> state;
  P<BatchNorm1d> norm{width};
  P<Linear> head{width, width};
};

/// Calls a module past its hook if it likes what it sees.
template <template <class> class P>
struct sometimes_past_hook : torch::nn::Module {
  sometimes_past_hook() {
    this->register_module("fc", fc);
    this->register_module("state", state);
  }
  Tensor forward(Tensor x) {
    auto y = torch::tanh(fc(x));
    if (x[0][0].template item<double>() > 0)
      y = static_cast<counter<P>&>(*state).forward(y);
    return y.square().mean();
  }
  P<Linear> fc{width, width};
  P<torch::nn::ModuleHolder<counter<P>>> state;
};

void require(bool x, const std::string& what) {
  if (!x)
    throw std::runtime_error{"not true: " + what};
}

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

std::vector<Tensor> batches() {
  std::vector<Tensor> result;
  for (int i = 0; i < 3; ++i) {
    auto x = torch::sin(torch::arange(8 * width * 1.0) + i).view({8, width});
    x.select(1, 0).copy_(torch::tensor({1., 1., -1., -1., 1., 1., -1., -1.}));
    result.push_back(x);
  }
  return result;
}

} // namespace

TEST_CASE("a microbatch that takes a detour is not overtaken",
          "[runtime][R19]") {
  for (auto& x : all_placements()) {
    INFO(x.ranks << " ranks, " << x.microbatches << " microbatches, "
                 << x.pipeline);
    CHECK(differences<detour>(x, batches()) == std::vector<std::string>{});
  }
}

TEST_CASE("a call that nobody could expect ends its step without a trace",
          "[runtime][R19]") {
  // Of each step the sign of x[0][0] by microbatch.
  auto batch = [](std::vector<double> signs) {
    auto x = torch::sin(torch::arange(8 * width * 1.0)).view({8, width});
    for (int64_t i = 0; i < 8; ++i)
      x[i][0] = signs.at(static_cast<size_t>(i / 2));
    return x;
  };
  std::vector<Tensor> xs{batch({-1, -1, -1, -1}), batch({1, -1, -1, -1}),
                         batch({-1, 1, 1, -1})};
  int repeated = 0;
  for (uint64_t seed = 1; seed <= 10; ++seed) {
    INFO("seed " << seed);
    model_options x;
    x.microbatches = 4;
    x.seed = seed;
    auto steps = run_ranks<returning>(x, xs);
    CHECK(differences<returning>(x, xs, steps) == std::vector<std::string>{});
    REQUIRE(steps.size() == 3);
    CHECK_FALSE(steps[0].repeated);
    CHECK_FALSE(steps[2].repeated); // the sure rule by now
    repeated += steps[1].repeated;
  }
  CHECK(repeated > 0);
}

TEST_CASE("the first training step releases what did not change",
          "[runtime][R19]") {
  run_virtual_world(2, manual_world(2, 2), [](session&) {
    distributed_model model{two_kinds{}};
    set_partition(*model->norm, 1);
    model.partition();
    require(has(model.partition_text(), "mask"), model.partition_text());
    require(has(model.order_text(), "'mask' in their order: buffer mask"),
            model.order_text());
    auto run = step([&](Tensor x) {
      auto loss = model(x);
      if (loss.requires_grad())
        model.backward(loss);
      return loss;
    });
    auto x = torch::ones({4, width});
    model.eval();
    run(x); // tells nothing: a batch norm in training changes more
    require(has(model.order_text(), "'mask'"), "an evaluation releases");
    model.train();
    run(x);
    auto text = model.order_text();
    require(!has(text, "'mask'"), "released: " + text);
    require(has(text, "'norm' in their order: buffers running_mean"), text);
    require(has(text, "'never'"), "what was not called is not judged");
  });
}

TEST_CASE("a module keeps an order because its user says so",
          "[runtime][R19]") {
  // Its state is a member that no buffer shows.
  std::vector<double> seen;
  run_virtual_world(2, manual_world(2, 4), [&](session&) {
    auto remote = [&](function_impl& self, Tensor x) {
      if (x.size(0) == 1)
        seen.push_back(x[0][0].item<double>());
      return x * self.weight;
    };
    // Older microbatches come later.
    auto local = [](caller_impl& self, Tensor x) {
      auto k = x[0][0].item<int64_t>();
      for (auto i = k; i < 3; ++i)
        self.there(torch::zeros({2, 3}));
      return self.there(x * self.here);
    };
    distributed_model model{seeded([&] { return caller{remote, local}; })};
    set_stateful(*model->there, "notes what it sees");
    auto run = step([&](Tensor x) { return model(x); });
    auto x = torch::arange(4.0).unsqueeze(1).expand({4, 3});
    for (int i = 0; i < 2; ++i)
      run(x);
    require(has(model.order_text(), "'there' in their order: notes what"),
            model.order_text());
  });
  CHECK(seen == std::vector<double>{0, 2, 4, 6, 0, 2, 4, 6});
}

TEST_CASE(
  "a body that runs on another rank than its owner's has the numbers "
  "of one process",
  "[runtime][R20][R19][R14]") {
  model_options x;
  x.ranks = 4; // all three away from where they are called
  x.microbatches = 4;
  x.steps = 3;
  auto fast = GENERATE(false, true);
  x.fast = fast;
  x.replay = GENERATE(false, true);
  x.fixed_order = !x.replay && GENERATE(false, true);
  CAPTURE(fast, x.replay, x.fixed_order);
  for (uint64_t seed = 1; seed <= 5; ++seed) {
    x.seed = seed;
    INFO("seed " << seed);
    CHECK(differences<past_hooks>(x, batches()) == std::vector<std::string>{});
  }
}

TEST_CASE(
  "state that changes past a hook at its owner is an error that names "
  "it",
  "[runtime][R20][R19]") {
  auto declared = GENERATE(false, true);
  run_virtual_world(2, manual_world(2, 4), [&](session& s) {
    distributed_model model{make_seeded<holder<past_hooks, submodule>>()};
    set_partition(*model->fc, 1);
    if (declared)
      set_stateful(*model, "calls modules past their hooks");
    auto run = step([&](Tensor x) {
      auto loss = model(x);
      model.backward(loss);
      return loss;
    });
    std::string text;
    auto before = model->state->count.clone();
    try {
      run(batches()[0]);
    } catch (const error& e) {
      text = e.what();
    }
    if (declared) {
      require(text.empty(), text);
      return;
    }
    require(has(text,
                "state: its buffer 'state.count' changed, but no call of "
                "it came through smp"),
            "rank " + std::to_string(s.rank()) + ": " + text);
    require(s.rank() != 0 || torch::equal(model->state->count, before),
            "the step left its state behind");
  });
}

// Who alone knew would go on alone, and all would wait for others.
TEST_CASE(
  "state that changes past a hook in one of the pipelines that share "
  "modules is an error of all",
  "[runtime][R20][R19][R43]") {
  auto world = manual_world(2, 2);
  world.config.tensor_parallel_degree = 2;
  world.config.tensor_parallel_modules = {"fc"};
  world.config.ddp = true;
  world.config.trace_device = "none";
  run_virtual_world(4, world, [&](session& s) {
    distributed_model model{
      make_seeded<holder<sometimes_past_hook, submodule>>()};
    set_partition(*model->fc, 1);
    auto run = step([&](Tensor x) {
      auto loss = model(x);
      model.backward(loss);
      return loss;
    });
    auto text_of = [&](double seen) {
      try {
        run(torch::full({4, width}, seen));
      } catch (const error& e) {
        return std::string{e.what()};
      }
      return std::string{};
    };
    auto text = text_of(dp_rank() == 0 ? 1 : -1);
    require(has(text, "state: its buffer 'state.count' changed"),
            "rank " + std::to_string(s.rank()) + ": " + text);
    text = text_of(-1);
    require(text.empty(), text);
  });
}

TEST_CASE("ranks that call other modules stateful are told which",
          "[runtime][R19]") {
  run_virtual_world(2, manual_world(2, 2), [](session& s) {
    distributed_model model{two_kinds{}};
    if (s.rank() == 1)
      set_stateful(*model->mask, "keeps a secret");
    std::string text;
    try {
      model.partition();
    } catch (const error& e) {
      text = e.what();
    }
    require(has(text,
                "smp::set_stateful was called for module 'mask' on rank "
                "1, but not on rank 0"),
            "rank " + std::to_string(s.rank()) + ": " + text);
  });
}
