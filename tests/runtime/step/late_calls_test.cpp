#include "tests/support/catch.hpp"

#include "tests/support/nothing_left.hpp"
#include "tests/support/torch/two_ranks.hpp"

#include <torch/utils.h>

#include <atomic>

// A microbatch calls a module with state more often than in earlier steps, when
// a younger one has been there (R19).

using namespace smp;
using namespace smp::test;

using Catch::Matchers::ContainsSubstring;

namespace {

constexpr size_t steps = 4;
/// From this step on the first microbatch makes one call more.
constexpr size_t late = 2;

/// Tells microbatches apart: the numbers of the first one begin below 0.
Tensor two_parts() {
  return torch::linspace(-1, 1, 12).view({4, 3});
}

bool of_first(const Tensor& x) {
  return x[0][0].item<float>() < 0;
}

struct late_caller_impl : torch::nn::Module {
  /// @param more the first microbatch makes one call more
  /// @param been the second one was in `there`
  late_caller_impl(const std::atomic<bool>& more, std::atomic<bool>& been)
    : here(register_parameter("here", torch::full({3}, 2.0))),
      more(more),
      been(been) {
    partition_scope on_rank_1{1};
    function_impl::code counting = [&been](function_impl& self, Tensor x) {
      if (!of_first(x))
        been = true;
      auto count = self.named_buffers()["count"];
      auto y = x * self.weight * (1 + count);
      torch::NoGradGuard no_grad;
      count += x.abs().sum();
      return y;
    };
    there = submodule<function>(counting);
    register_module("there", there);
    there->register_buffer("count", torch::zeros({1}));
    function_impl::code next = [](function_impl&, Tensor x) { return x + 1; };
    other = submodule<function>(next);
    register_module("other", other);
  }

  Tensor forward(Tensor x) {
    auto y = there(x * here);
    if (!more || !of_first(x))
      return y;
    while (!been) { // a call that waits lets the second microbatch run
      torch::NoGradGuard no_grad;
      other(x).sum().item<float>();
    }
    return there(y);
  }

  Tensor here;
  const std::atomic<bool>& more;
  std::atomic<bool>& been;
  submodule<function> there = nullptr, other = nullptr;
};
TORCH_MODULE_IMPL(late_caller, late_caller_impl);

struct seen_step {
  failure why;
  std::string ran_again;
  double loss = 0;
  Tensor here, weight; // gradients
  Tensor count;
};

std::vector<seen_step> run_late(std::optional<bool> fast, bool no_rerun) {
  std::vector<seen_step> result(steps);
  std::atomic<bool> more = false, been = false;
  auto world = manual_world(2, 2);
  world.config.fast_mode = fast;
  if (fast != false) // a step in which nothing was promised
    world.config.no_promises = {"other"};
  run_virtual_world(2, world, [&](session& s) {
    distributed_model model{seeded([&] { return late_caller{more, been}; })};
    auto body = [&](Tensor x) {
      auto loss = model(x).sum();
      model.backward(loss);
      return loss;
    };
    auto train_step = step(body, {.no_rerun = no_rerun});
    for (size_t i = 0; i < steps; ++i) {
      for (auto& p : model.local_parameters())
        p.mutable_grad() = Tensor{};
      if (s.rank() == 0) {
        more = i >= late;
        been = i != late;
      }
      barrier();
      seen_step mine;
      try {
        mine.loss = train_step(two_parts()).reduce_mean().item<double>();
      } catch (const error& e) {
        mine.why = e.cause();
      }
      mine.ran_again = s.last_step().ran_again;
      barrier();
      check_nothing_left(s);
      for (auto& [name, grad] : model.gradients())
        (name == "here" ? mine.here : mine.weight) = grad;
      for (auto& [name, x] : model.state_dict())
        if (name == "there.count")
          mine.count = x.clone();
      if (s.rank() == 0)
        result[i] = mine;
    }
  });
  return result;
}

/// The same by LibTorch alone.
/// @param skips the step in which the calls are more for the first time
std::vector<seen_step> late_alone(bool skips) {
  std::vector<seen_step> result(steps);
  auto count = torch::zeros({1});
  for (size_t i = 0; i < steps; ++i) {
    if (skips && i == late)
      continue;
    auto here = torch::full({3}, 2.0).requires_grad_();
    auto weight = torch::ones({3}).requires_grad_();
    for (auto& x : two_parts().chunk(2)) {
      auto y = x * here;
      for (int calls = i >= late && of_first(x) ? 2 : 1; calls > 0; --calls) {
        auto before = count;
        count = count + y.detach().abs().sum();
        y = y * weight * (1 + before);
      }
      (y.sum() / 2).backward(); // R15
      result[i].loss += y.sum().item<double>() / 2;
    }
    result[i].here = here.grad();
    result[i].weight = weight.grad();
    result[i].count = count;
  }
  return result;
}

} // namespace

TEST_CASE("a step in which state is met too often, too late, is run again",
          "[runtime][fast][auto][R19][R42]") {
  struct row {
    std::optional<bool> fast;
    bool no_rerun;
  };
  auto [fast, no_rerun] = GENERATE(row{{}, false}, row{{}, true},
                                   row{false, false});
  const auto fails = fast || no_rerun;
  CAPTURE(fails, no_rerun);
  const auto found = run_late(fast, no_rerun);
  const auto right = late_alone(fails);
  const auto told = ContainsSubstring("microbatch 0 calls it more often");
  for (size_t i = 0; i < steps; ++i) {
    INFO("step " << i << ": " << found[i].why.describe());
    CHECK(found[i].ran_again.empty() == (fails || i != late));
    CHECK(bool{found[i].why} == (fails && i == late));
    if (found[i].why) {
      CHECK(found[i].why.module == "there");
      CHECK_THAT(found[i].why.text, told);
      // What a user of smp-train can do about it.
      CHECK_THAT(found[i].why.text,
                 ContainsSubstring("smp.active_microbatches = 1"));
      // What the step added is taken off.
      CHECK(torch::equal(found[i].count, found[i - 1].count));
      continue;
    }
    CHECK(std::abs(found[i].loss - right[i].loss)
          < 1e-5 * (1 + std::abs(right[i].loss)));
    CHECK(torch::allclose(found[i].here, right[i].here));
    CHECK(torch::allclose(found[i].weight, right[i].weight));
    CHECK(torch::allclose(found[i].count, right[i].count));
  }
  if (!fails)
    CHECK_THAT(found[late].ran_again, told);
}
