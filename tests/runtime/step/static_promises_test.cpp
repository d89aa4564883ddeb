#include "tests/support/catch.hpp"

#include "tests/support/error_of.hpp"
#include "tests/support/nothing_left.hpp"
#include "tests/support/torch/two_ranks.hpp"

#include <torch/nn/modules/linear.h>
#include <torch/utils.h>

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <string>
#include <vector>

// Promises in replayed steps (R33, R38): what travels, and that numbers stay.

using namespace smp;
using namespace smp::test;
using torch::nn::Linear;

namespace {

constexpr int64_t width = 8;

/// Layers on other ranks, called by any code.
struct layers_impl : torch::nn::Module {
  using code = std::function<Tensor(layers_impl&, Tensor)>;

  layers_impl(uint32_t ranks, code f)
    : here(register_parameter("here", torch::full({1}, 1.5))), f(std::move(f)) {
    for (uint32_t i = 0; i < 6; ++i) {
      partition_scope on{1 + i % (ranks - 1)};
      xs.emplace_back(width, width);
      register_module(fmt::format("layer{}", i), xs.back());
    }
  }

  Tensor forward(Tensor x) {
    return f(*this, x * here);
  }

  Tensor here;
  std::vector<submodule<Linear>> xs;
  code f;
};
TORCH_MODULE_IMPL(layers, layers_impl);

Tensor chain(layers_impl& m, Tensor x) {
  for (auto& layer : m.xs)
    x = layer(x);
  return x;
}

/// The first result is used again at the end.
Tensor long_skip(layers_impl& m, Tensor x) {
  auto first = m.xs[0](x);
  auto y = first;
  for (size_t i = 1; i < 5; ++i)
    y = m.xs[i](y);
  return m.xs[5](torch::tanh(y) + first);
}

/// Each result is used again on the way back.
Tensor hourglass(layers_impl& m, Tensor x) {
  auto a = m.xs[0](x), b = m.xs[1](a), c = m.xs[2](b);
  auto d = m.xs[3](torch::relu(c) + b);
  return m.xs[4](d + a) * x;
}

Tensor residuals(layers_impl& m, Tensor x) {
  for (auto& layer : m.xs)
    x = x + layer(x);
  return x;
}

/// Only the last call of a layer has a result that its caller looks at.
Tensor recurrent(layers_impl& m, Tensor x) {
  for (int i = 0; i < 4; ++i)
    x = m.xs[1](m.xs[0](x));
  return torch::tanh(x);
}

/// Looks at everything.
Tensor touches(layers_impl& m, Tensor x) {
  for (auto& layer : m.xs)
    x = torch::tanh(layer(x));
  return x;
}

const std::map<std::string, layers_impl::code> programs{
  {"chain", chain},         {"long skip", long_skip}, {"hourglass", hourglass},
  {"residuals", residuals}, {"recurrent", recurrent}, {"touches", touches}};

struct mode {
  bool fast = false; // calls go on, as by default
  bool replay = false;
};

/// What the last of several steps sent, all ranks together.
struct traffic {
  uint64_t requests = 0;
  uint64_t waits = 0;
  uint64_t replayed = 0; // ranks
  uint64_t again = 0;    // steps that ran again, of all ranks
  Tensor loss;
  named_tensors gradients;
};

traffic run(const layers_impl::code& f, uint32_t ranks, mode how) {
  constexpr int64_t rows = 2;
  constexpr uint64_t microbatches = 4;
  constexpr int steps = 6;
  auto world = manual_world(ranks, microbatches);
  if (!how.fast)
    world.config.fast_mode = false;
  world.config.static_mode = how.replay;
  if (how.replay)
    world.config.static_steps = 1;
  world.reorder = false;
  traffic result;
  std::mutex mutex;
  run_virtual_world(ranks, world, [&](session& s) {
    distributed_model model{seeded([&] { return layers{ranks, f}; })};
    auto train_step = step([&](Tensor x) {
      auto loss = model(x).pow(2).sum();
      model.backward(loss);
      return loss;
    });
    auto n = static_cast<int64_t>(microbatches) * rows;
    auto x = torch::sin(torch::arange(n * width * 1.0)).view({n, width});
    for (int i = 0; i < steps; ++i) {
      for (auto& p : model.local_parameters())
        p.mutable_grad() = Tensor{};
      auto loss = train_step(x.to(torch::kFloat)).reduce_mean();
      barrier();
      check_nothing_left(s);
      auto gradients = model.gradients();
      auto stats = s.last_step();
      std::unique_lock guard{mutex};
      result.again += !stats.ran_again.empty();
      if (i < steps - 1)
        continue;
      result.replayed += stats.replayed;
      result.requests += stats.requests;
      result.waits += stats.waits;
      if (s.rank() == 0) {
        result.loss = loss;
        result.gradients = std::move(gradients);
      }
    }
  });
  return result;
}

bool equal(const traffic& a, const traffic& b) {
  if (!torch::allclose(a.loss, b.loss, 1e-5, 1e-6)
      || a.gradients.size() != b.gradients.size())
    return false;
  for (size_t i = 0; i < a.gradients.size(); ++i)
    if (!torch::allclose(a.gradients[i].second, b.gradients[i].second, 1e-4,
                         1e-5))
      return false;
  return true;
}

} // namespace

TEST_CASE("a replayed step with promises has the numbers of one that waits",
          "[runtime][fast][static][R33]") {
  auto* name = GENERATE("chain", "long skip", "hourglass", "residuals",
                        "recurrent", "touches");
  auto& f = programs.at(name);
  auto ranks = GENERATE(2u, 3u, 4u);
  INFO(name << ", " << ranks << " ranks");
  auto slow = run(f, ranks, {});
  auto fast = run(f, ranks, {.fast = true});
  auto plain = run(f, ranks, {.replay = true});
  auto both = run(f, ranks, {.fast = true, .replay = true});
  CHECK(both.replayed == ranks);
  CHECK(fast.again + both.again == 0);
  CHECK(equal(slow, fast));
  CHECK(equal(slow, plain));
  CHECK(equal(slow, both));
  CHECK(both.requests == fast.requests);
  CHECK(both.waits <= slow.waits);
}

// -- divergences --------------------------------------------------------------

namespace {

enum class change { none, number, shape, dtype, result, module };

/// Makes as many rows as `kept` wants, which its caller cannot see.
struct scaling_impl : torch::nn::Module {
  explicit scaling_impl(const std::atomic<bool>& shorter)
    : weight(register_parameter("weight", torch::full({4}, 1.25))),
      shorter(shorter) {
    // nop
  }

  Tensor forward(Tensor x, double factor) {
    auto y = x * weight * factor;
    return shorter ? y.slice(0, 0, 1) : y;
  }

  Tensor weight;
  const std::atomic<bool>& shorter;
};
TORCH_MODULE_IMPL(scaling, scaling_impl);

struct changing_impl : torch::nn::Module {
  changing_impl(const std::atomic<change>& what,
                const std::atomic<bool>& shorter)
    : here(register_parameter("here", torch::full({4}, 0.5))), what(what) {
    partition_scope on{1};
    for (auto* x : {&first, &second, &third}) {
      *x = submodule<scaling>(shorter);
      register_module(fmt::format("part{}", xs++), *x);
    }
  }

  Tensor forward(Tensor x) {
    auto how = what.load();
    auto y = first(x * here, how == change::number ? 3.0 : 2.0);
    if (how == change::module)
      y = third(y, 1.0);
    y = second(y, 1.0);
    auto z = how == change::dtype ? x.to(torch::kDouble) : x;
    z = z.slice(0, 0, how == change::shape ? 1 : x.size(0));
    return y.sum() + third(z * here, 1.5).sum();
  }

  Tensor here;
  const std::atomic<change>& what;
  int xs = 0;
  submodule<scaling> first = nullptr, second = nullptr, third = nullptr;
};
TORCH_MODULE_IMPL(changing, changing_impl);

struct changed_step {
  std::string error;
  bool replayed = false;
  bool fell_back = false;
  named_tensors gradients;
};

/// Runs steps of which all but the last two are alike, the one before the last
/// does `what`.
std::vector<changed_step> run_changing(change what, bool both, uint64_t seed) {
  constexpr size_t steps = 8;
  auto world = manual_world(2, 3);
  // A divergence ends the run also where a broken promise would not.
  if (!both || seed == 1)
    world.config.fast_mode = both;
  world.config.static_mode = both;
  if (both)
    world.config.static_steps = 1;
  world.seed = seed;
  std::vector<changed_step> result(steps);
  std::atomic<change> how = change::none;
  std::atomic<bool> shorter = false;
  run_virtual_world(2, world, [&](session& s) {
    distributed_model model{seeded([&] { return changing{how, shorter}; })};
    auto train_step = step([&](Tensor x) {
      auto loss = model(x);
      model.backward(loss);
      return loss;
    });
    auto x = torch::cos(torch::arange(24.0)).view({6, 4});
    for (size_t i = 0; i < steps; ++i) {
      for (auto& p : model.local_parameters())
        p.mutable_grad() = Tensor{};
      barrier();
      if (s.rank() == 0) {
        how = i + 2 == steps ? what : change::none;
        shorter = how == change::result;
      }
      barrier();
      auto text = error_of([&] { train_step(x.to(torch::kFloat)); });
      barrier();
      check_nothing_left(s);
      auto gradients = model.gradients();
      if (s.rank() == 0)
        result[i] = {text, s.last_step().replayed, s.last_step().fell_back,
                     std::move(gradients)};
    }
  });
  return result;
}

} // namespace

TEST_CASE("a replayed step with promises may differ in all but what it calls",
          "[runtime][fast][static][R33][R38]") {
  auto what = GENERATE(change::number, change::shape, change::result,
                       change::dtype, change::module);
  auto diverges = what == change::dtype || what == change::module;
  auto seed = GENERATE(1u, 2u, 3u);
  CAPTURE(what, seed);
  auto steps = run_changing(what, true, seed);
  auto right = run_changing(what, false, seed);
  CHECK(steps[5].replayed);
  CHECK(steps[6].replayed == !diverges);
  CHECK(steps[6].fell_back == diverges);
  CHECK(steps[7].replayed); // the record is as good as before
  for (size_t i = 0; i < steps.size(); ++i) {
    INFO("step " << i);
    CHECK(steps[i].error == "no error");
    REQUIRE(steps[i].gradients.size() == right[i].gradients.size());
    for (size_t k = 0; k < right[i].gradients.size(); ++k)
      CHECK(torch::allclose(steps[i].gradients[k].second,
                            right[i].gradients[k].second));
  }
}

// -- what the record knows ----------------------------------------------------

TEST_CASE("a call that waits in the record waits, whatever is known by now",
          "[runtime][fast][static][R33]") {
  // As it looks at the result by turns, each step learns something, and of
  // records of such steps the first one is replayed: in which the call waited,
  // as nothing was known of its kind.
  constexpr int steps = 8;
  auto world = manual_world(2);
  world.config.static_mode = true;
  world.config.static_steps = 1;
  std::vector<double> sums;
  std::vector<step_stats> seen;
  run_virtual_world(2, world, [&](session& s) {
    int count = 0; // of rank 0
    auto scale = [](function_impl& m, Tensor x) { return x * m.weight; };
    auto call = [&](caller_impl& m, Tensor x) {
      torch::NoGradGuard no_grad;
      auto y = m.there(x);
      return ++count % 2 == 0 ? y.sum() : x.sum();
    };
    distributed_model model{seeded([&] { return caller{scale, call}; })};
    auto run = step([&](Tensor x) { return model(x); });
    for (int i = 0; i < steps; ++i) {
      auto sum = run(torch::ones({2, 3})).reduce_mean().item<double>();
      if (s.rank() != 0)
        continue;
      sums.push_back(sum);
      seen.push_back(s.last_step());
    }
  });
  CHECK(sums == std::vector<double>(steps, 6));
  REQUIRE(seen.size() == steps);
  for (size_t i = 0; i < seen.size(); ++i) {
    INFO("step " << i);
    CHECK(seen[i].requests == 1);
    CHECK(seen[i].replayed == (i >= 4));
    CHECK_FALSE(seen[i].fell_back);
    // Else it goes on, and what it waits for later may be there by then.
    if (i == 0 || i >= 4)
      CHECK(seen[i].waits == 1);
  }
}

// -- sizes --------------------------------------------------------------------

namespace {

/// A step whose code on rank 0 reads sizes of what rank 1 makes.
struct sized_step {
  std::string error;
  int64_t rows = 0; // what it read
  int ran = 0;      // calls on rank 1 that were over by then
  bool replayed = false;
  bool ran_again = false;
  double loss = 0;
  named_tensors gradients;
};

constexpr size_t sized_steps = 8;
/// In this step results have one row instead of four.
constexpr size_t shorter_step = 6;

Tensor sized_input() {
  return torch::linspace(1, 2, 12).view({4, 3});
}

/// @param shortens in `shorter_step`
std::vector<sized_step> run_sized(bool fixed_order, bool shortens,
                                  std::optional<bool> fast_mode = {}) {
  std::vector<sized_step> result(sized_steps);
  auto world = manual_world(2);
  world.config.static_mode = true;
  world.config.fast_mode = fast_mode;
  world.config.deterministic_server = fixed_order;
  if (!fixed_order)
    world.config.static_steps = 1;
  std::atomic<bool> shorter = false;
  std::atomic<int> ran = 0;
  std::atomic<int64_t> rows = 0;
  std::atomic<int> ran_by_then = 0;
  run_virtual_world(2, world, [&](session& s) {
    auto scale = [&](function_impl& m, Tensor x) {
      ++ran;
      auto y = x * m.weight;
      return shorter ? y.slice(0, 0, 1) : y;
    };
    auto call = [&](caller_impl& m, Tensor x) {
      ran = 0;
      auto y = m.there(x * m.here);
      auto z = y + m.there(y); // made on rank 1, too
      rows = std::min(y.size(0), z.size(0));
      ran_by_then = ran.load();
      return (z * rows.load()).sum();
    };
    distributed_model model{seeded([&] { return caller{scale, call}; })};
    auto train_step = step([&](Tensor x) {
      auto loss = model(x);
      model.backward(loss);
      return loss;
    });
    for (size_t i = 0; i < sized_steps; ++i) {
      for (auto& p : model.local_parameters())
        p.mutable_grad() = Tensor{};
      if (s.rank() == 0)
        shorter = shortens && i == shorter_step;
      barrier();
      double loss = 0;
      auto text = error_of(
        [&] { loss = train_step(sized_input()).reduce_mean().item<double>(); });
      barrier();
      check_nothing_left(s);
      auto gradients = model.gradients();
      if (s.rank() == 0)
        result[i] = {text,
                     rows,
                     ran_by_then,
                     s.last_step().replayed,
                     !s.last_step().ran_again.empty(),
                     loss,
                     std::move(gradients)};
    }
  });
  return result;
}

/// Compares with LibTorch alone, which reads the sizes that there are.
void check_sized(const sized_step& x, bool shorter) {
  auto here = torch::full({3}, 2.0).requires_grad_();
  auto weight = torch::ones({3}).requires_grad_();
  auto y = sized_input() * here * weight;
  if (shorter)
    y = y.slice(0, 0, 1);
  auto z = y + y * weight;
  auto loss = (z * z.size(0)).sum();
  loss.backward();
  CHECK(x.error == "no error");
  CHECK(x.rows == z.size(0));
  CHECK(x.loss == Catch::Approx(loss.item<double>()).epsilon(1e-5));
  std::map<std::string, Tensor> gradients{x.gradients.begin(),
                                          x.gradients.end()};
  REQUIRE(gradients.size() == 2);
  CHECK(torch::allclose(gradients.at("here"), here.grad()));
  CHECK(torch::allclose(gradients.at("there.weight"), weight.grad()));
}

} // namespace

TEST_CASE("sizes of a replayed promise are those of the record",
          "[runtime][fast][static][R33]") {
  auto fixed_order = GENERATE(false, true);
  CAPTURE(fixed_order);
  auto steps = run_sized(fixed_order, false);
  CHECK(steps.back().replayed);
  for (size_t i = 0; i < steps.size(); ++i) {
    INFO("step " << i);
    check_sized(steps[i], false);
    // Ranks that share a process run by turns: nothing ran on rank 1 unless
    // rank 0 waited.
    CHECK(steps[i].ran == (steps[i].replayed && !fixed_order ? 0 : 2));
  }
}

TEST_CASE("a step that read wrong sizes from the record runs again, or fails",
          "[runtime][fast][static][R33]") {
  auto again = GENERATE(true, false);
  CAPTURE(again);
  auto steps = run_sized(false, true,
                         again ? std::nullopt : std::optional{true});
  CHECK(steps[shorter_step - 1].replayed);
  for (size_t i = 0; i < steps.size(); ++i) {
    INFO("step " << i);
    if (i != shorter_step || again)
      check_sized(steps[i], i == shorter_step);
    else
      CHECK_THAT(steps[i].error, Catch::Matchers::ContainsSubstring(
                                   "which smp.static_mode replays: the record "
                                   "has [4, 3] as result 0, this step [1, 3] "
                                   "(write smp.static_mode = false)"));
  }
  CHECK(steps[shorter_step].ran_again == again);
  CHECK(steps.back().ran == 2); // the record tells no sizes any more
}
