#include "tests/support/catch.hpp"

#include "runtime/lazy/promise.hpp"
#include "tests/support/nothing_left.hpp"
#include "tests/support/torch/two_ranks.hpp"

#include <torch/csrc/autograd/custom_function.h>
#include <torch/utils.h>

#include <fmt/format.h>

#include <atomic>
#include <chrono>
#include <stdexcept>

// What goes wrong in fast mode: promises that cannot be kept, failures that
// nobody waits for, ranks that die (R38, R39). Nothing hangs, nothing is left.

using namespace smp;
using namespace smp::test;

namespace {

namespace ag = torch::autograd;

/// The outcome of one step on all ranks.
struct outcome_of_step {
  failure why;
  double loss = 0;
};

Tensor input() {
  return torch::linspace(-1, 1, 12).view({4, 3});
}

/// Runs a model whose module `there` is on rank 1, several steps.
/// @returns per step, what it came to; on every rank the same
std::vector<outcome_of_step> run(int steps, function_impl::code remote,
                                 caller_impl::code local,
                                 uint64_t microbatches = 1) {
  std::vector<outcome_of_step> result(static_cast<size_t>(steps));
  auto world = manual_world(2, microbatches);
  world.config.fast_mode = true;
  std::mutex mutex;
  std::vector<failure> seen_elsewhere;
  run_virtual_world(2, world, [&](session& s) {
    distributed_model model{seeded([&] { return caller{remote, local}; })};
    auto train_step = step([&](Tensor x) {
      auto loss = model(x).sum();
      if (loss.requires_grad())
        model.backward(loss);
      return loss;
    });
    model.partition();
    for (auto& outcome : result) {
      failure why;
      double loss = 0;
      try {
        loss = train_step(input()).reduce_mean().item<double>();
      } catch (const error& e) {
        why = e.cause();
      }
      barrier();
      check_nothing_left(s);
      std::unique_lock guard{mutex};
      if (s.rank() == 0)
        outcome = {why, loss};
      else
        seen_elsewhere.push_back(why);
    }
  });
  for (size_t i = 0; i < result.size(); ++i)
    CHECK(seen_elsewhere.at(i) == result[i].why);
  return result;
}

/// Calls `there` four times in a row; its third call is another one.
failure third_call(function_impl::code usual, function_impl::code third,
                   bool checks_recovery = true) {
  std::atomic<int> calls = 0;
  auto remote = [&](function_impl& self, Tensor x) {
    return ++calls == 3 ? third(self, x) : usual(self, x);
  };
  auto local = [](caller_impl& self, Tensor x) {
    auto y = x * self.here;
    for (int i = 0; i < 4; ++i)
      y = self.there(y);
    return y;
  };
  auto found = run(2, remote, local);
  if (checks_recovery) {
    CHECK_FALSE(found[1].why);
    auto weight = torch::ones({3});
    auto expected = input() * 2;
    for (int i = 0; i < 4; ++i)
      expected = expected * 2;
    CHECK(std::abs(found[1].loss - expected.sum().item<double>()) < 1e-4);
  }
  return found[0].why;
}

Tensor twice(function_impl& self, Tensor x) {
  return x * self.weight * 2;
}

} // namespace

TEST_CASE("a call that returns something else than before is a named error",
          "[runtime][fast]") {
  auto check = [](const failure& x, const std::string& how) {
    CHECK(x.code == error_code::unsupported);
    CHECK(x.rank == rank_id{1});
    CHECK(x.module == "there");
    CHECK(x.text
          == how
               + ", which an earlier call with arguments of the same kind did "
                 "not, so that its caller went on without it (smp.fast_mode): "
                 "list 'there' in smp.no_promises");
  };
  check(third_call(twice,
                   [](function_impl& self, Tensor x) {
                     return twice(self, x).to(torch::kDouble);
                   }),
        "result 0 has dtype Double");
  check(third_call(twice, [](function_impl& self,
                             Tensor x) { return twice(self, x).detach(); }),
        "result 0 does not require grad");
  check(third_call(twice, [](function_impl&, Tensor) { return Tensor{}; }),
        "its result has another structure");
  check(third_call(twice, [](function_impl&, Tensor x) { return x; }),
        "result 0 is an argument or a parameter");
  check(third_call(twice, [](function_impl& self,
                             Tensor x) { return twice(self, x.mul_(1)); }),
        "it changed its tensor argument 0 in place");
}

TEST_CASE("a call may draw random numbers where earlier ones did not",
          "[runtime][fast][R23]") {
  CHECK_FALSE(third_call(twice, [](function_impl& self, Tensor x) {
    return twice(self, x) + torch::rand({1}) * 0;
  }));
}

TEST_CASE("calls that cannot be told from earlier ones wait and are right",
          "[runtime][fast]") {
  std::atomic<int> calls = 0;
  auto found = run(
    3,
    [&](function_impl& self, Tensor x) {
      // By turns a result of its own and its argument.
      return calls++ % 2 == 0 ? x : twice(self, x);
    },
    [](caller_impl& self, Tensor x) {
      auto y = x * self.here;
      for (int i = 0; i < 4; ++i)
        y = self.there(y);
      return y;
    });
  for (auto& x : found) {
    CHECK_FALSE(x.why);
    CHECK(std::abs(x.loss - (input() * 8).sum().item<double>()) < 1e-4);
  }
}

TEST_CASE(
  "the first cause of a failure reaches every rank, whoever would have "
  "needed the result",
  "[runtime][fast][R39]") {
  auto why = third_call(twice, [](function_impl&, Tensor) -> Tensor {
    throw std::runtime_error{"no space left"};
  });
  CHECK(why.code == error_code::user_code);
  CHECK(why.module == "there");
  CHECK(why.rank == rank_id{1});
  CHECK(why.text == "no space left");
}

TEST_CASE("a failure of a call whose result nobody uses ends the step",
          "[runtime][fast][R39]") {
  std::atomic<int> calls = 0;
  auto found = run(
    2,
    [&](function_impl& self, Tensor x) {
      if (++calls == 3)
        throw std::runtime_error{"seen by nobody"};
      return twice(self, x);
    },
    [](caller_impl& self, Tensor x) {
      auto y = x * self.here;
      auto z = self.there(y);
      self.there(y); // dropped
      self.there(y); // dropped, and fails
      return z;
    });
  CHECK(found[0].why.text == "seen by nobody");
  CHECK_FALSE(found[1].why);
}

TEST_CASE("a failure in backward ends the step although nobody waits for it",
          "[runtime][fast][R39]") {
  struct bad : ag::Function<bad> {
    static Tensor forward(ag::AutogradContext*, Tensor x) {
      return x * 1;
    }
    static ag::variable_list backward(ag::AutogradContext*, ag::variable_list) {
      throw std::runtime_error{"bad backward"};
    }
  };
  std::atomic<int> calls = 0;
  auto found = run(
    3,
    [&](function_impl& self, Tensor x) {
      auto y = twice(self, x);
      return calls++ == 3 ? bad::apply(y) : y;
    },
    // Its input has no gradient, so nothing comes back.
    [](caller_impl& self, Tensor x) { return self.there(self.there(x)); });
  CHECK_FALSE(found[0].why);
  CHECK(found[1].why.text == "bad backward");
  CHECK(found[1].why.module == "there");
  CHECK_FALSE(found[2].why);
}

TEST_CASE("a promise that outlives its step can be read", "[runtime][fast]") {
  std::vector<Tensor> kept;
  auto found = run(
    3, twice,
    [&](caller_impl& self, Tensor x) {
      auto y = self.there(x);
      kept.push_back(y);
      return y * self.here;
    },
    2);
  CHECK_FALSE(found[2].why);
  REQUIRE(kept.size() == 6);
  for (size_t i = 0; i < kept.size(); ++i) {
    CHECK_FALSE(is_promise(kept[i]));
    CHECK(kept[i].sizes() == at::IntArrayRef({2, 3}));
  }
}

TEST_CASE("backward around model.backward stays refused",
          "[runtime][fast][R16]") {
  auto found = run(2, twice, [](caller_impl& self, Tensor x) {
    auto y = self.there(x * self.here);
    y.sum().backward();
    return y;
  });
  for (auto& x : found) {
    INFO(x.why.text);
    CHECK(x.why.text.find("backward through 'there' of rank 1: call "
                          "model.backward(loss) inside the step")
          != std::string::npos);
  }
}

TEST_CASE("a second backward through a kept graph works", "[runtime][fast]") {
  std::map<std::string, Tensor> gradients;
  for (auto fast : {false, true}) {
    auto world = manual_world(2);
    world.config.fast_mode = fast;
    run_virtual_world(2, world, [&](session& s) {
      distributed_model model{seeded([&] {
        return caller{twice, [](caller_impl& self, Tensor x) {
                        return self.there(self.there(x * self.here));
                      }};
      })};
      auto train_step = step([&](Tensor x) {
        auto y = model(x);
        model.backward({y.sum()}, {Tensor{}}, true);
        model.backward({y.square().sum()}, {Tensor{}});
        return y.sum();
      });
      for (int i = 0; i < 3; ++i)
        train_step(input());
      auto found = model.gradients();
      if (s.rank() != 0)
        return;
      for (auto& [name, x] : found)
        if (!fast)
          gradients[name] = x;
        else if (!torch::allclose(gradients.at(name), x))
          throw std::runtime_error{"another gradient: " + name};
    });
  }
  CHECK(gradients.size() == 2);
}

TEST_CASE("the death of an owner ends a step that holds its promises",
          "[runtime][fast][R39]") {
  failure seen;
  auto world = manual_world(2);
  world.config.fast_mode = true;
  CHECK_THROWS(run_virtual_world(2, world, [&](session& s) {
    distributed_model model{seeded([&] {
      return caller{twice, [](caller_impl& self, Tensor x) {
                      auto y = x * self.here;
                      for (int i = 0; i < 4; ++i)
                        y = self.there(y);
                      return y;
                    }};
    })};
    auto train_step = step([&](Tensor x) {
      auto loss = model(x).sum();
      model.backward(loss);
      return loss;
    });
    train_step(input());
    barrier();
    if (s.rank() == 1)
      throw std::runtime_error{"gone"}; // as a crash
    try {
      train_step(input());
    } catch (const error& e) {
      seen = e.cause();
    }
  }));
  INFO(seen.describe());
  CHECK(seen.code == error_code::rank_down);
  CHECK(seen.rank == rank_id{1});
}
