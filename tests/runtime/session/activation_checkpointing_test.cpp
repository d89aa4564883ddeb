#include "tests/support/catch.hpp"

#include "tests/support/torch/live_bytes.hpp"
#include "tests/support/torch/models.hpp"
#include "tests/support/torch/training_step.hpp"
#include "tests/support/torch/two_ranks.hpp"

#include <c10/util/ThreadLocalDebugInfo.h>

#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>

#include <algorithm>
#include <atomic>

// What backward computes again (R52): which modules, how often, with what
// memory.

using namespace smp;
using namespace smp::test;

using Catch::Matchers::ContainsSubstring;
using torch::nn::BatchNorm1d;
using torch::nn::Dropout;
using torch::nn::Linear;

namespace {

using again = model_options::again;
using none = std::vector<std::string>;

constexpr int64_t width = 6;

/// x: [8, 6], another one for each step.
std::vector<Tensor> batches() {
  std::vector<Tensor> result;
  for (int i = 0; i < 3; ++i)
    result.push_back(
      torch::sin(torch::arange(8.0 * width) * (i + 1) * 0.7).view({8, width}));
  return result;
}

} // namespace

// -- Sequential ---------------------------------------------------------------

namespace {

template <template <class> class P>
struct tower : torch::nn::Module {
  tower() {
    register_module("body", body);
    register_module("head", head);
  }
  Tensor forward(Tensor x) {
    return head(body->forward(x)).square().mean();
  }
  torch::nn::Sequential body{
    Linear(width, width), Dropout(0.3), torch::nn::Tanh(),   BatchNorm1d(width),
    Linear(width, width), Dropout(0.3), Linear(width, width)};
  P<Linear> head{width, 1};
};

} // namespace

TEST_CASE("children of a Sequential are computed again by each strategy",
          "[runtime][R52]") {
  for (auto* strategy : {"each", "contiguous", "group_2", "group_3"})
    for (uint64_t ranks : {1, 2})
      for (auto scattered : {false, true}) {
        model_options x;
        x.recompute = again::outermost;
        x.strategy = strategy;
        x.ranks = ranks;
        x.microbatches = 4;
        x.round_robin = scattered;
        INFO(strategy << ", " << ranks << " ranks"
                      << (scattered ? ", scattered" : ""));
        CHECK(differences<tower>(x, batches()) == none{});
      }
}

// -- state -------------------------------------------------------------------

namespace {

/// Changes its buffer, calls a module that may be elsewhere, so that other
/// microbatches run meanwhile, and reads the buffer again.
template <template <class> class P>
struct keeper : torch::nn::Module {
  keeper() {
    register_buffer("count", count);
    register_module("fc", fc);
  }
  Tensor forward(Tensor x) {
    {
      torch::NoGradGuard no_grad;
      count.add_(1);
    }
    auto h = fc(x * (count * 0.25));
    return torch::tanh(h) * (count * 0.5);
  }
  Tensor count = torch::zeros({});
  P<Linear> fc{width, width};
};

template <template <class> class P>
struct keepers : torch::nn::Module {
  keepers() {
    register_module("a", a);
    register_module("b", b);
    register_module("head", head);
  }
  Tensor forward(Tensor x) {
    return head(a(b(a(x)) + x)).square().mean();
  }
  using part = torch::nn::ModuleHolder<keeper<P>>;
  P<part> a, b;
  P<Linear> head{width, width};
};

} // namespace

TEST_CASE("what waits while it is computed again leaves state to others",
          "[runtime][R52][R19]") {
  for (auto recompute : {again::outermost, again::all})
    for (uint64_t ranks : {1, 2, 3})
      for (auto fast : {false, true}) {
        model_options x;
        x.recompute = recompute;
        x.ranks = ranks;
        x.fast = fast;
        x.microbatches = 4;
        INFO((recompute == again::all ? "all" : "outermost")
             << ", " << ranks << " ranks" << (fast ? ", fast" : ""));
        CHECK(differences<keepers>(x, batches()) == none{});
      }
}

TEST_CASE("what is differentiated twice is computed again twice",
          "[runtime][R52]") {
  for (uint32_t where : {0, 1}) {
    std::map<bool, Tensor> gradients; // by whether it is computed again
    for (auto recompute : {false, true}) {
      run_virtual_world(2, manual_world(2, 1), [&](session& s) {
        distributed_model model{seeded([] {
          return caller{[](function_impl& self, Tensor x) {
                          return torch::dropout(x * self.weight, 0.5, true);
                        },
                        [](caller_impl& self, Tensor x) {
                          return self.there(x * self.here).sum();
                        }};
        })};
        set_partition(*model->there, where);
        if (recompute)
          set_activation_checkpointing(*model->there);
        auto train_step = step([&](Tensor x) {
          auto loss = model(x);
          model.backward(loss, {}, true);
          model.backward(loss * 2);
          return loss.detach();
        });
        train_step(torch::ones({3}));
        auto all = model.gradients();
        if (s.rank() == 0)
          for (auto& [name, x] : all)
            if (name == "here")
              gradients[recompute] = x;
      });
    }
    CHECK(torch::equal(gradients.at(false), gradients.at(true)));
  }
}

TEST_CASE("outside of a step nothing is computed again", "[runtime][R52]") {
  auto same = false;
  auto world = manual_world(1, 1);
  world.config.activation_checkpointing = {{"body", "head"}, "contiguous"};
  run_virtual_world(1, world, [&](session&) {
    auto made = seeded([] { return std::make_shared<tower<submodule>>(); });
    made->eval();
    auto x = torch::ones({2, width});
    auto before = made->forward(x);
    distributed_model model{torch::nn::ModuleHolder<tower<submodule>>{made}};
    model.partition();
    auto after = made->forward(x);
    after.backward();
    same = torch::equal(before, after) && made->head->weight.grad().defined();
  });
  CHECK(same);
}

// -- how often ----------------------------------------------------------------

namespace {

struct counting_impl : torch::nn::Module {
  counting_impl() {
    register_module("fc", fc);
  }
  Tensor forward(Tensor x) {
    ++runs;
    graphs += torch::GradMode::is_enabled();
    return torch::tanh(fc(x));
  }
  static inline std::atomic<int> runs = 0, graphs = 0;
  submodule<Linear> fc{width, width};
};
TORCH_MODULE_IMPL(counting, counting_impl);

struct twice_impl : torch::nn::Module {
  explicit twice_impl(uint32_t second) {
    register_module("first", first);
    partition_scope there{second};
    this->second = submodule<counting>{};
    register_module("second", this->second);
  }
  Tensor forward(Tensor x) {
    return second(first(x)).square().mean();
  }
  submodule<counting> first, second = nullptr;
};
TORCH_MODULE_IMPL(twice, twice_impl);

struct counted {
  int runs = 0, graphs = 0;
  uint64_t requests = 0;
};

counted run_twice(const std::vector<std::string>& names, bool backward = true) {
  auto world = manual_world(2, 2);
  world.config.fast_mode = false;
  world.config.activation_checkpointing.modules = names;
  counting_impl::runs = counting_impl::graphs = 0;
  counted result;
  run_virtual_world(2, world, [&](session& s) {
    distributed_model model{seeded([] { return twice{1}; })};
    auto train_step = step([&](Tensor x) {
      auto loss = model(x);
      if (backward)
        model.backward(loss);
      return loss;
    });
    train_step(torch::ones({4, width}));
    if (s.rank() == 0)
      result.requests = s.last_step().requests;
  });
  result.runs = counting_impl::runs;
  result.graphs = counting_impl::graphs;
  return result;
}

} // namespace

TEST_CASE("a module is computed once more, without a message",
          "[runtime][R52]") {
  auto kept = run_twice({});
  CHECK(kept.runs == 4); // two modules, two microbatches
  CHECK(kept.graphs == 4);
  auto x = run_twice({"first", "second"});
  CHECK(x.runs == 8);
  CHECK(x.graphs == 4);
  CHECK(x.requests == kept.requests);
  // Without backward nothing is.
  CHECK(run_twice({"first", "second"}, false).runs == 4);
}

// -- random numbers -----------------------------------------------------------

TEST_CASE("other random numbers are drawn if they need not be kept",
          "[runtime][R52]") {
  for (auto preserve : {true, false}) {
    auto world = manual_world(1, 1);
    world.config.activation_checkpointing = {{"drop"}, "each", preserve};
    auto same = !preserve;
    run_virtual_world(1, world, [&](session&) {
      struct dropping_impl : torch::nn::Module {
        dropping_impl() {
          register_module("drop", drop);
          register_parameter("weight", weight);
        }
        Tensor forward(Tensor) {
          y = drop(weight);
          return y.sum();
        }
        submodule<Dropout> drop{0.5};
        Tensor weight = torch::ones({1000});
        Tensor y;
      };
      auto made = std::make_shared<dropping_impl>();
      distributed_model model{torch::nn::ModuleHolder<dropping_impl>{made}};
      auto train_step = training_step(model);
      train_step(torch::ones({1}));
      // The gradient of what was dropped is 0, of what was not 2.
      same = torch::equal(made->weight.grad(), made->y.detach());
    });
    CHECK(same == preserve);
  }
}

// -- errors -------------------------------------------------------------------

namespace {

/// Runs one step over `module` on rank `where`, which is checkpointed.
/// @returns the error
std::string error_with(function_impl::code f, uint32_t where,
                       const caller_impl::code& local) {
  auto world = manual_world(2, 1);
  world.config.fast_mode = false;
  std::string result;
  run_virtual_world(2, world, [&](session& s) {
    distributed_model model{seeded([&] { return caller{f, local}; })};
    set_partition(*model->there, where);
    set_activation_checkpointing(*model->there);
    auto train_step = training_step(model);
    try {
      train_step(torch::ones({3}));
    } catch (const error& e) {
      if (s.rank() == 0)
        result = e.what();
    }
  });
  return result;
}

} // namespace

TEST_CASE("a module that returns nothing with a gradient is an error",
          "[runtime][R52]") {
  for (uint32_t where : {0, 1}) {
    auto text = error_with(
      [](function_impl& self, Tensor x) { return (x * self.weight).argmax(); },
      where,
      [](caller_impl& self, Tensor x) {
        return (x * self.here).sum() + self.there(x * self.here);
      });
    CHECK_THAT(text,
               ContainsSubstring("'there'")
                 && ContainsSubstring("returns nothing that has a gradient"));
  }
}

TEST_CASE("an argument that is changed after the call is an error",
          "[runtime][R52]") {
  auto text = error_with(
    [](function_impl& self, Tensor x) { return x + self.weight; }, 0,
    [](caller_impl& self, Tensor x) {
      auto h = x * self.here;
      auto y = self.there(h);
      h.add_(1);
      return (h + y).sum();
    });
  CHECK_THAT(text, ContainsSubstring("'there'")
                     && ContainsSubstring("tensor argument 0 was changed in "
                                          "place after the call"));
}

TEST_CASE("a module that fails when it is computed again ends the step",
          "[runtime][R52]") {
  for (uint32_t where : {0, 1}) {
    auto text = error_with(
      [](function_impl& self, Tensor x) {
        if (torch::GradMode::is_enabled())
          throw std::runtime_error{"not again"};
        return x * self.weight;
      },
      where,
      [](caller_impl& self, Tensor x) {
        return self.there(x * self.here).sum();
      });
    CHECK_THAT(text, ContainsSubstring("not again"));
  }
}

// -- memory -------------------------------------------------------------------

namespace {

constexpr int64_t rows = 64, narrow = 32, wide = 4 * narrow, blocks = 12;

struct wide_block_impl : torch::nn::Module {
  wide_block_impl() {
    register_module("up", up);
    register_module("down", down);
  }
  Tensor forward(Tensor x) {
    return down(torch::gelu(up(x)));
  }
  Linear up{narrow, wide}, down{wide, narrow};
};
TORCH_MODULE_IMPL(wide_block, wide_block_impl);

struct wide_tower_impl : torch::nn::Module {
  wide_tower_impl() {
    for (int64_t i = 0; i < blocks; ++i)
      body->push_back(wide_block{});
    register_module("body", body);
  }
  Tensor forward(Tensor x) {
    return body->forward(x);
  }
  torch::nn::Sequential body;
};
TORCH_MODULE_IMPL(wide_tower, wide_tower_impl);

/// @returns bytes that live after forward, and at most in the step
std::pair<int64_t, int64_t> bytes_of_step(const std::string& strategy) {
  auto world = manual_world(1, 1);
  if (!strategy.empty())
    world.config.activation_checkpointing = {{"body"}, strategy};
  auto bytes = std::make_shared<live_bytes>();
  std::pair<int64_t, int64_t> result;
  run_virtual_world(1, world, [&](session&) {
    distributed_model model{seeded([] { return wide_tower{}; })};
    auto train_step = step([&](Tensor x) {
      bytes->now = bytes->peak = 0;
      c10::DebugInfoGuard guard{c10::DebugInfoKind::PROFILER_STATE, bytes};
      auto y = model(x);
      auto loss = y.sum();
      result.first = bytes->now;
      model.backward(loss);
      result.second = bytes->peak;
      return loss.detach();
    });
    // Gradients are there from the first step on, and what writes is known.
    for (int i = 0; i < 2; ++i)
      train_step(torch::ones({rows, narrow}));
  });
  return result;
}

} // namespace

TEST_CASE("only the arguments of what is computed again are kept",
          "[runtime][R52][memory]") {
  constexpr int64_t input = 4 * rows * narrow; // of a block, in bytes
  constexpr int64_t inside = 2 * 4 * rows * wide;
  auto is = [](int64_t found, int64_t expected) {
    INFO(found << " bytes, expected " << expected);
    CHECK(found >= expected);
    CHECK(found <= expected + expected / 20);
  };
  // The input of the first block is the step's, the result of the last counts.
  is(bytes_of_step("").first, blocks * (input + inside));
  is(bytes_of_step("each").first, blocks * input);
  is(bytes_of_step("group_3").first, blocks / 3 * input);
  is(bytes_of_step("contiguous").first, input);
  // At most, in backward: one block again, with its gradients (not more than
  // what it keeps).
  auto most = bytes_of_step("each").second;
  CHECK(most <= blocks * input + 2 * (input + inside));
  CHECK(bytes_of_step("").second >= blocks * (input + inside));
}
