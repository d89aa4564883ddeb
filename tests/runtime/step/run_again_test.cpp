#include "tests/support/catch.hpp"

#include "tests/support/nothing_left.hpp"
#include "tests/support/torch/two_ranks.hpp"

#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/utils.h>

#include <atomic>

// With default settings a promise that does not hold costs time and nothing
// else: the step is taken back on all ranks and run again (docs/modes.md).

using namespace smp;
using namespace smp::test;

using Catch::Matchers::ContainsSubstring;

namespace {

/// What one step came to, on every rank the same.
struct outcome_of_step {
  failure why;
  std::string ran_again;
  bool replayed = false;
  double loss = 0;
  std::map<std::string, Tensor> gradients;
};

struct job {
  int steps = 3;
  uint64_t microbatches = 1;
  /// Gradients add up over the steps, from a tensor of ones on.
  bool accumulates = false;
  /// On pp_rank 0, while no rank is in a step.
  std::function<void(size_t)> before_step = {};
  std::function<void(virtual_world_options&)> change = {};
  std::function<void(caller&)> prepare = {};
  std::function<void()> on_body = [] {};
  step_options options = {};
};

Tensor input() {
  return torch::linspace(-1, 1, 12).view({4, 3});
}

/// Runs a model whose module `there` is on rank 1, with default settings.
std::vector<outcome_of_step> run(const job& x, function_impl::code remote,
                                 caller_impl::code local) {
  std::vector<outcome_of_step> result(static_cast<size_t>(x.steps));
  std::vector<outcome_of_step> elsewhere(result.size());
  auto world = manual_world(2, x.microbatches);
  if (x.change)
    x.change(world);
  run_virtual_world(2, world, [&](session& s) {
    distributed_model model{seeded([&] {
      caller made{remote, local};
      if (x.prepare)
        x.prepare(made);
      return made;
    })};
    auto body = [&, on_body = x.on_body](Tensor x) {
      on_body();
      auto loss = model(x).sum();
      if (loss.requires_grad())
        model.backward(loss);
      return loss;
    };
    auto train_step = step(body, x.options);
    model.partition();
    if (x.accumulates)
      for (auto& p : model.local_parameters())
        p.mutable_grad() = torch::ones_like(p);
    for (size_t i = 0; i < result.size(); ++i) {
      auto& out = s.rank() == 0 ? result[i] : elsewhere[i];
      if (!x.accumulates)
        for (auto& p : model.local_parameters())
          p.mutable_grad() = Tensor{};
      if (x.before_step && s.rank() == 0)
        x.before_step(i);
      barrier();
      try {
        out.loss = train_step(input()).reduce_mean().item<double>();
      } catch (const error& e) {
        out.why = e.cause();
      }
      out.ran_again = s.last_step().ran_again;
      out.replayed = s.last_step().replayed;
      barrier();
      check_nothing_left(s);
      for (auto& [name, grad] : model.gradients())
        out.gradients[name] = grad.clone();
    }
  });
  for (size_t i = 0; i < result.size(); ++i) {
    CHECK(elsewhere[i].why == result[i].why);
    CHECK(elsewhere[i].ran_again == result[i].ran_again);
  }
  return result;
}

Tensor twice(function_impl& self, Tensor x) {
  return x * self.weight * 2;
}

/// Calls `there` four times in a row.
Tensor four_times(caller_impl& self, Tensor x) {
  auto y = x * self.here;
  for (int i = 0; i < 4; ++i)
    y = self.there(y).to(torch::kFloat);
  return y;
}

/// Loss and gradients of `four_times` over `twice`, by LibTorch alone.
struct expected {
  double loss = 0;
  Tensor here, weight;
};

expected without_smp(uint64_t microbatches) {
  auto here = torch::full({3}, 2.0).requires_grad_();
  auto weight = torch::ones({3}).requires_grad_();
  expected result;
  for (auto& x : input().chunk(static_cast<int64_t>(microbatches))) {
    auto y = x * here;
    for (int i = 0; i < 4; ++i)
      y = y * weight * 2;
    (y.sum() / static_cast<double>(microbatches)).backward(); // R15
    result.loss += y.sum().item<double>() / static_cast<double>(microbatches);
  }
  result.here = here.grad();
  result.weight = weight.grad();
  return result;
}

void check_equal(const outcome_of_step& x, const expected& y,
                 double earlier = 0, double times = 1) {
  INFO(x.why.describe());
  CHECK_FALSE(x.why);
  CHECK(std::abs(x.loss - y.loss) < 1e-3);
  CHECK(torch::allclose(x.gradients.at("here"), y.here * times + earlier));
  CHECK(torch::allclose(x.gradients.at("there.weight"),
                        y.weight * times + earlier));
}

/// `twice`; while `odd` every other call does something else.
function_impl::code by_turns(const std::atomic<bool>& odd,
                             function_impl::code other) {
  auto calls = std::make_shared<std::atomic<int>>(0);
  return [&odd, calls, other](function_impl& self, Tensor x) {
    return odd && (*calls)++ % 2 == 0 ? other(self, x) : twice(self, x);
  };
}

/// The same numbers as `twice`, but another type.
Tensor twice_as_double(function_impl& self, Tensor x) {
  return twice(self, x).to(torch::kDouble);
}

Tensor twice_in_place(function_impl& self, Tensor x) {
  return x.mul_(1) * self.weight * 2;
}

/// From the second step on.
std::function<void(size_t)> odd_later(std::atomic<bool>& odd) {
  return [&odd](size_t step) { odd = step > 0; };
}

} // namespace

TEST_CASE("a step in which a promise does not hold is run again and is right",
          "[runtime][fast][auto]") {
  struct broken {
    const char* how;
    function_impl::code code;
  };
  for (uint64_t microbatches : {1, 2}) {
    auto right = without_smp(microbatches);
    for (auto& [how, other] :
         {broken{"result 0 has dtype Double", twice_as_double},
          broken{"it changed its tensor argument 0 in place",
                 twice_in_place}}) {
      CAPTURE(microbatches, how);
      std::atomic<bool> odd = false;
      auto found = run({.steps = 4,
                        .microbatches = microbatches,
                        .before_step = odd_later(odd)},
                       by_turns(odd, other), four_times);
      CHECK(found[0].ran_again.empty());
      CHECK_THAT(found[1].ran_again, ContainsSubstring(how));
      CHECK_THAT(found[1].ran_again, ContainsSubstring("module there"));
      // From then on calls of this kind wait.
      CHECK(found[2].ran_again.empty());
      CHECK(found[3].ran_again.empty());
      for (auto& x : found)
        check_equal(x, right);
    }
  }
}

TEST_CASE("a replayed step in which a promise does not hold is run again",
          "[runtime][fast][auto][static][deterministic][R42]") {
  constexpr size_t broken = 7;
  auto deterministic = GENERATE(false, true);
  auto microbatches = GENERATE(uint64_t{1}, uint64_t{2});
  auto in_place = GENERATE(false, true);
  CAPTURE(deterministic, microbatches, in_place);
  std::atomic<bool> odd = false;
  auto found = run({.steps = 2 * broken,
                    .microbatches = microbatches,
                    .before_step = [&](size_t i) { odd = i == broken; },
                    .change =
                      [&](virtual_world_options& world) {
                        auto& x = world.config;
                        x.static_mode = !deterministic;
                        if (x.static_mode)
                          x.static_steps = 1;
                        x.deterministic_server = deterministic;
                      }},
                   by_turns(odd, in_place ? twice_in_place : twice_as_double),
                   four_times);
  auto right = without_smp(microbatches);
  for (size_t i = 0; i < found.size(); ++i) {
    INFO("step " << i);
    check_equal(found[i], right);
    CHECK(found[i].ran_again.empty() == (i != broken));
  }
  CHECK_THAT(found[broken].ran_again,
             ContainsSubstring("module there")
               && ContainsSubstring("list 'there' in smp.no_promises"));
  CHECK(found[broken - 1].replayed);
  CHECK_FALSE(found[broken].replayed);
  CHECK(found.back().replayed);
}

TEST_CASE("gradients from before a step stay when it is run again",
          "[runtime][fast][auto]") {
  auto right = without_smp(2);
  std::atomic<bool> odd = false;
  auto found = run(
    {.microbatches = 2, .accumulates = true, .before_step = odd_later(odd)},
    by_turns(odd, twice_as_double), four_times);
  CHECK_FALSE(found[1].ran_again.empty());
  for (size_t i = 0; i < found.size(); ++i)
    check_equal(found[i], right, 1, static_cast<double>(i + 1));
}

TEST_CASE("code that saw the wrong type of a promise is run again",
          "[runtime][fast][auto]") {
  auto right = without_smp(1);
  std::atomic<bool> odd = false;
  auto all_odd = [&](function_impl& self, Tensor x) {
    return odd ? twice_as_double(self, x) : twice(self, x);
  };
  SECTION("the step body throws before the answer tells") {
    auto picky = [&](caller_impl& self, Tensor x) {
      auto y = x * self.here;
      for (int i = 0; i < 4; ++i) {
        y = self.there(y);
        if (odd != (y.scalar_type() == torch::kDouble))
          throw std::runtime_error{"another type than one process has"};
        y = y.to(torch::kFloat);
      }
      return y;
    };
    auto found = run({.before_step = odd_later(odd)}, all_odd, picky);
    CHECK_THAT(found[1].ran_again,
               ContainsSubstring("another type than one process has"));
    CHECK(found[2].ran_again.empty());
    for (auto& x : found)
      check_equal(x, right);
  }
  SECTION("what it calls next fails") {
    auto next = [&](function_impl& self, Tensor x) {
      if (x.scalar_type() == torch::kHalf)
        throw std::runtime_error{"half is not taken"};
      return all_odd(self, x);
    };
    auto caller = [&](caller_impl& self, Tensor x) {
      auto y = x * self.here;
      for (int i = 0; i < 4; ++i) {
        y = self.there(y);
        auto type = odd && y.scalar_type() == torch::kFloat ? torch::kHalf
                                                            : torch::kFloat;
        y = y.to(type);
      }
      return y;
    };
    auto found = run({.before_step = odd_later(odd)}, next, caller);
    CHECK_FALSE(found[1].ran_again.empty());
    for (auto& x : found)
      check_equal(x, right);
  }
}

TEST_CASE("an error of the user's code is told once it happened twice",
          "[runtime][fast][auto]") {
  std::atomic<bool> odd = false;
  std::atomic<int> thrown = 0;
  auto found = run(
    {.steps = 4, .before_step = [&](size_t step) { odd = step == 2; }},
    [&](function_impl& self, Tensor x) -> Tensor {
      if (odd) {
        ++thrown;
        throw std::runtime_error{"no space left"};
      }
      return twice(self, x);
    },
    four_times);
  CHECK(thrown == 2);
  CHECK(found[2].why.code == error_code::user_code);
  CHECK(found[2].why.module == "there");
  CHECK(found[2].why.text == "no space left");
  check_equal(found[3], without_smp(1));
}

TEST_CASE("random numbers and buffers are those of a step that ran once",
          "[runtime][fast][auto]") {
  struct result {
    std::vector<double> losses;
    Tensor mean;
    uint64_t again = 0;
  };
  auto run_norm = [](std::optional<bool> fast) {
    result out;
    std::atomic<bool> odd = false;
    auto world = manual_world(2, 2);
    world.config.fast_mode = fast;
    run_virtual_world(2, world, [&](session& s) {
      auto norm = std::make_shared<torch::nn::BatchNorm1dImpl>(3);
      auto model_code = [&, norm](caller_impl& self, Tensor x) {
        auto y = norm->forward(x * self.here + torch::rand({3}));
        return four_times(self, y);
      };
      distributed_model model{seeded([&] {
        caller made{by_turns(odd, twice_as_double), model_code};
        made->register_module("norm", norm);
        return made;
      })};
      auto train_step = step([&](Tensor x) {
        auto loss = model(x).square().sum();
        model.backward(loss);
        return loss;
      });
      for (size_t i = 0; i < 3; ++i) {
        odd = i > 0;
        barrier();
        auto loss = train_step(input()).reduce_mean().item<double>();
        if (s.rank() == 0) {
          out.losses.push_back(loss);
          out.again += !s.last_step().ran_again.empty();
        }
        barrier();
      }
      if (s.rank() == 0)
        out.mean = norm->running_mean.clone();
    });
    return out;
  };
  auto waiting = run_norm(false);
  auto found = run_norm({});
  CHECK(found.again == 1);
  CHECK(waiting.again == 0);
  for (size_t i = 0; i < 3; ++i)
    CHECK(std::abs(found.losses[i] - waiting.losses[i])
          < 1e-4 * std::abs(waiting.losses[i]));
  CHECK(torch::allclose(found.mean, waiting.mean));
}

namespace {

/// Multiplies by more each time, while `on`.
function_impl::code counting(const std::atomic<bool>& on) {
  return [&on](function_impl& self, Tensor x) {
    auto count = self.named_buffers()["count"];
    auto y = x * self.weight * (1 + count);
    if (on) {
      at::NoGradGuard no_grad;
      count += x.detach().abs().sum();
    }
    return y;
  };
}

void add_count(caller& model) {
  model->there->register_buffer("count", torch::zeros({1}));
}

Tensor calls_once(caller_impl& self, Tensor x) {
  return self.there(x * self.here);
}

/// What `counting` comes to in each step, by LibTorch alone.
/// @param counts tells which steps change the buffer
std::vector<expected> counted(size_t steps, int64_t microbatches, int calls,
                              const std::function<bool(size_t)>& counts) {
  std::vector<expected> result(steps);
  auto count = torch::zeros({1});
  for (size_t i = 0; i < steps; ++i) {
    auto here = torch::full({3}, 2.0).requires_grad_();
    auto weight = torch::ones({3}).requires_grad_();
    for (auto& x : input().chunk(microbatches)) {
      auto y = x * here;
      for (int j = 0; j < calls; ++j) {
        auto before = y;
        y = y * weight * (1 + count);
        if (counts(i))
          count = count + before.detach().abs().sum();
      }
      (y.sum() / static_cast<double>(microbatches)).backward();
      result[i].loss += y.sum().item<double>()
                        / static_cast<double>(microbatches);
    }
    result[i].here = here.grad();
    result[i].weight = weight.grad();
  }
  return result;
}

void check_close(const outcome_of_step& x, const expected& y) {
  INFO(x.why.describe());
  CHECK_FALSE(x.why);
  CHECK(std::abs(x.loss - y.loss) < 1e-5 * (1 + std::abs(y.loss)));
  CHECK(torch::allclose(x.gradients.at("here"), y.here));
  CHECK(torch::allclose(x.gradients.at("there.weight"), y.weight));
}

} // namespace

TEST_CASE(
  "a buffer that changes later than in the first step has its order "
  "from then on",
  "[runtime][fast][auto][R19]") {
  auto fast = GENERATE(as<std::optional<bool>>{}, std::nullopt, false);
  std::atomic<bool> on = false;
  auto found = run(
    {.steps = 4,
     .microbatches = 2,
     .before_step = odd_later(on),
     .change = [&](auto& world) { world.config.fast_mode = fast; },
     .prepare = add_count},
    counting(on), calls_once);
  auto fails = fast.has_value();
  auto right = counted(4, 2, 1, [&](size_t i) { return i > (fails ? 1 : 0); });
  auto told = ContainsSubstring(
    "count' changed, which it did not in the first "
    "training step");
  for (size_t i : {0, 1, 2, 3}) {
    CAPTURE(fails, i);
    CHECK(found[i].ran_again.empty() == (fails || i != 1));
    if (fails && i == 1)
      CHECK_THAT(found[i].why.text, told);
    else
      check_close(found[i], right[i]);
  }
  if (!fails)
    CHECK_THAT(found[1].ran_again, told);
}

TEST_CASE("what a step that runs again was the first to change is put back",
          "[runtime][fast][auto][R19]") {
  std::atomic<bool> odd = false;
  auto calls = std::make_shared<std::atomic<int>>(0);
  auto found = run(
    {.steps = 3, .before_step = odd_later(odd), .prepare = add_count},
    [&, code = counting(odd)](function_impl& self, Tensor x) {
      auto y = code(self, x);
      return odd && (*calls)++ == 1 ? y.to(torch::kDouble) : y;
    },
    four_times);
  auto right = counted(3, 1, 4, [](size_t i) { return i > 0; });
  CHECK_FALSE(found[1].ran_again.empty());
  for (size_t i : {0, 1, 2})
    check_close(found[i], right[i]);
}

TEST_CASE("a step that cannot be taken back keeps its error",
          "[runtime][fast][auto]") {
  std::atomic<bool> odd = false;
  job x{.before_step = odd_later(odd)};
  SECTION("by the configuration") {
    x.change = [](virtual_world_options& world) {
      world.config.fast_mode = true;
    };
  }
  SECTION("as its body says") {
    x.options.no_rerun = true;
  }
  SECTION("because a module has state that nobody sees") {
    x.prepare = [](caller& model) { set_stateful(*model, "counts its calls"); };
  }
  auto found = run(x, by_turns(odd, twice_as_double), four_times);
  CHECK(found[1].ran_again.empty());
  CHECK(found[1].why.code == error_code::unsupported);
  CHECK_THAT(found[1].why.text, ContainsSubstring("result 0 has dtype Double"));
}

TEST_CASE("a body that must not run twice runs once", "[runtime][fast][auto]") {
  for (auto refuses : {false, true}) {
    CAPTURE(refuses);
    std::atomic<bool> odd = false;
    std::atomic<int> bodies = 0;
    auto found = run({.steps = 2,
                      .microbatches = 2,
                      .before_step = odd_later(odd),
                      .on_body = [&] { ++bodies; },
                      .options = {.no_rerun = refuses}},
                     by_turns(odd, twice_as_double), four_times);
    CHECK(bool{found[1].why} == refuses);
    CHECK(found[1].ran_again.empty() == refuses);
    // Of a step that fails, the second microbatch may not begin.
    if (refuses)
      CHECK((bodies == 3 || bodies == 4));
    else
      CHECK((bodies == 5 || bodies == 6));
  }
}
