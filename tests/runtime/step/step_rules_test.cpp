#include "tests/support/catch.hpp"

#include "runtime/lazy/placeholder.hpp"
#include "runtime/step/model_state.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/torch/two_ranks.hpp"

#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/sgd.h>
#include <torch/utils.h>

#include <atomic>
#include <chrono>
#include <set>
#include <thread>

// Rules R1 to R7, R15, R17, R20 to R23 and R28 at the level of sessions.

using namespace smp;
using namespace smp::test;

using Catch::Matchers::ContainsSubstring;

namespace {

Tensor times_weight(function_impl& self, Tensor x) {
  return x * self.weight;
}

Tensor call_there(caller_impl& self, Tensor x) {
  return self.there(x * self.here);
}

auto make_caller(function_impl::code remote = times_weight,
                 caller_impl::code local = call_there) {
  return seeded([&] { return caller{remote, local}; });
}

/// Fails the rank, and so the test: Catch2's macros are for its own thread.
void require(bool x, const std::string& what) {
  if (!x)
    throw std::runtime_error{"not true: " + what};
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

} // namespace

// -- steps --------------------------------------------------------------------

TEST_CASE("a rank serves a step only after its own optimizer is done",
          "[runtime][R1]") {
  std::atomic<rank_runtime*> rank_1 = nullptr;
  Tensor seen;
  run_virtual_world(2, manual_world(), [&](session& s) {
    distributed_model model{make_caller()};
    auto evaluate = step([&](Tensor x) {
      torch::NoGradGuard no_grad;
      return model(x);
    });
    if (s.rank() == 1)
      rank_1 = &s.internals();
    evaluate(torch::ones({1, 3}));
    if (s.rank() == 1) {
      // The optimizer is held until rank 0's request waits at this rank.
      auto limit = std::chrono::steady_clock::now() + std::chrono::seconds{20};
      while (rank_1.load()->actors().status(std::chrono::seconds{5}).later == 0)
        require(std::chrono::steady_clock::now() < limit, "a request waits");
      torch::NoGradGuard no_grad;
      model->there->weight.fill_(100);
    }
    auto y = evaluate(torch::ones({1, 3})).concat();
    if (s.rank() == 0)
      seen = y;
  });
  CHECK(torch::equal(seen, torch::full({1, 3}, 200.0)));
}

TEST_CASE("a body without backward is an evaluation", "[runtime][R4]") {
  run_virtual_world(2, manual_world(2, 4), [](session& s) {
    distributed_model model{make_caller()};
    auto evaluate = step([&](Tensor x) { return model(x); });
    auto y = evaluate(torch::arange(12.0).view({4, 3})).concat();
    require(torch::equal(y, torch::arange(12.0).view({4, 3}) * 2), "values");
    require(s.internals().calls().size() == 0, "no saved call is left");
  });
}

TEST_CASE("some microbatches may skip their backward", "[runtime][R4]") {
  run_virtual_world(2, manual_world(2, 4), [](session&) {
    distributed_model model{make_caller()};
    auto train_step = step([&](Tensor x) {
      auto loss = model(x).sum();
      if (x[0][0].item<double>() != 0)
        model.backward(loss);
      return loss;
    });
    auto x = torch::ones({4, 3});
    x[2] = 0;
    train_step(x);
    auto g = model.gradients();
    // three of four microbatches: d/dw sum(2 x w) / 4
    require(torch::allclose(g[1].second, torch::full({3}, 1.5)), "gradient");
  });
}

TEST_CASE("several backward calls in one body are one grant", "[runtime][R4]") {
  run_virtual_world(2, manual_world(2, 2), [](session&) {
    distributed_model model{make_caller()};
    auto train_step = step([&](Tensor x) {
      auto y = model(x);
      model.backward(y.sum(), {}, true);
      model.backward(y.sum() * 2);
      return y;
    });
    train_step(torch::ones({2, 3}));
    auto g = model.gradients();
    require(torch::allclose(g[1].second, torch::full({3}, 6.0)), "gradient");
  });
}

TEST_CASE("a second distributed model is refused", "[runtime][R4]") {
  run_virtual_world(1, manual_world(1), [](session&) {
    distributed_model model{make_caller()};
    require(contains(error_of([] { distributed_model other{make_caller()}; }),
                     "a session has one distributed model; make one module "
                     "that holds both"),
            "named error");
  });
}

TEST_CASE("all ranks get what the bodies returned", "[runtime][R5]") {
  std::atomic<int> bodies = 0;
  run_virtual_world(2, manual_world(2, 2), [&](session& s) {
    distributed_model model{make_caller()};
    using result = std::tuple<Tensor, std::map<std::string, Tensor>, int64_t>;
    auto evaluate = step([&](Tensor x, int64_t k) -> result {
      ++bodies;
      // 80 KB: stays on pp_rank 0 until it is touched.
      return {model(x), {{"large", x.sum() * torch::ones({20000})}}, k + 1};
    });
    auto x = s.rank() == 0 ? torch::ones({4, 3}) : Tensor{};
    {
      auto y = evaluate(x, 5);
      auto& values = y.outputs();
      require(values.size() == 2, "two microbatches");
      require(std::get<2>(values[1]) == 6, "numbers");
      require(torch::equal(std::get<0>(values[0]), torch::full({2, 3}, 2.0)),
              "small tensors");
      require(torch::equal(std::get<1>(values[1]).at("large"),
                           torch::full({20000}, 6.0)),
              "large tensors");
    }
    auto tensors = step([&](Tensor x) { return std::pair{model(x), x.sum()}; });
    auto z = tensors(x);
    require(z.reduce_mean().second.item<double>() == 6, "reduce_mean");
    require(z.reduce_sum().second.item<double>() == 12, "reduce_sum");
    require(z.concat().first.size(0) == 4, "concat");
    require(z.stack().first.sizes() == torch::IntArrayRef({2, 2, 3}), "stack");
    pp_barrier(); // releases are under way
    pp_barrier();
    evaluate(x, 1);
  });
  CHECK(bodies == 4);
}

TEST_CASE("an axis that microbatches do not divide is an error everywhere",
          "[runtime][step]") {
  run_virtual_world(2, manual_world(2, 4), [](session&) {
    distributed_model model{make_caller()};
    auto evaluate = step([&](Tensor x) { return model(x); });
    auto text = error_of([&] { evaluate(torch::ones({6, 3})); });
    require(contains(text, "argument 0") && contains(text, "6")
              && contains(text, "smp.microbatches")
              && contains(text, "drop_last"),
            text);
    auto other = step(
      [&](Tensor x, Tensor whole, std::vector<Tensor> xs) {
        require(whole.size(0) == 7 && xs[0].size(1) == 1, "options");
        return model(x);
      },
      step_options{.non_split_inputs = {1}, .input_split_axes = {{2, 1}}});
    other(torch::ones({4, 3}), torch::ones({7}),
          std::vector<Tensor>{torch::ones({2, 4})});
  });
}

TEST_CASE("options for arguments that a step does not have are refused",
          "[runtime][step]") {
  run_virtual_world(2, manual_world(), [](session&) {
    distributed_model model{make_caller()};
    auto told = [&](step_options options) {
      auto evaluate = step([&](Tensor x, Tensor y) { return model(x + y); },
                           std::move(options));
      return error_of(
        [&] {
          evaluate(torch::ones({1, 3}), torch::ones({1, 3}));
        },
        error_code::config);
    };
    auto text = told({.non_split_inputs = {0, 2}});
    require(text
              == "step_options::non_split_inputs has argument 2, but the step "
                 "has 2, which count from 0",
            text);
    text = told({.input_split_axes = {{2, 1}}});
    require(text
              == "step_options::input_split_axes has argument 2, but the step "
                 "has 2, which count from 0",
            text);
    text = told({.non_split_inputs = {1}, .input_split_axes = {{1, 1}}});
    require(text
              == "step_options::input_split_axes has an axis for argument 1, "
                 "which is not split (non_split_inputs)",
            text);
    text = told({.non_split_inputs = {1}, .input_split_axes = {{0, -2}}});
    require(text == "no error", text);
  });
}

// -- errors -------------------------------------------------------------------

TEST_CASE("an exception on one rank ends the step on all with one error",
          "[runtime][R6]") {
  auto caught = GENERATE(false, true);
  std::atomic<bool> broken = true;
  std::set<std::string> texts;
  std::mutex mutex;
  run_virtual_world(2, manual_world(2, 4), [&](session& s) {
    distributed_model model{make_caller([&](function_impl& self, Tensor x) {
      if (broken && x.sum().item<double>() == 0)
        throw std::runtime_error{"the sum is zero"};
      return x * self.weight;
    })};
    auto train_step = step([&](Tensor x) {
      auto y = x;
      try {
        y = model(x);
      } catch (const std::exception&) {
        if (!caught)
          throw;
      }
      auto loss = y.sum();
      if (loss.requires_grad())
        model.backward(loss);
      return loss;
    });
    auto x = torch::ones({4, 3});
    x[1] = 0;
    auto text = error_of([&] { train_step(x); });
    {
      std::unique_lock guard{mutex};
      texts.insert(text);
    }
    require(contains(text, "rank 1") && contains(text, "there")
              && contains(text, "the sum is zero"),
            text);
    // The session stays usable.
    pp_barrier();
    broken = false;
    pp_barrier();
    auto y = train_step(torch::ones({4, 3})).reduce_sum();
    require(y.item<double>() == 24, "next step");
    require(s.internals().calls().size() == 0, "no saved call is left");
  });
  CHECK(texts.size() == 1);
}

TEST_CASE("an error names the module that threw, whoever runs it",
          "[runtime][R6]") {
  for (uint32_t where : {0, 1})
    run_virtual_world(2, manual_world(), [&](session&) {
      auto fails = true;
      distributed_model model{make_caller(
        [](function_impl& self, Tensor x) {
          if (x.sum().item<double>() == 0)
            throw std::runtime_error{"the sum is zero"};
          return x * self.weight;
        },
        [&](caller_impl& self, Tensor x) {
          if (fails)
            return self.there(x * 0);
          try {
            self.there(x * 0);
          } catch (const std::runtime_error&) {
            // not that of what follows
          }
          self.there(x);
          throw std::runtime_error{"in the body"};
        })};
      model->there->smp_hook.pinned = where;
      auto evaluate = step([&](Tensor x) { return model(x); });
      auto of_step = [&] {
        return error_of([&] { evaluate(torch::ones({1, 3})); });
      };
      auto text = of_step();
      require(text
                == "rank " + std::to_string(where)
                     + ", module there: the sum is zero",
              text);
      if (where != 0)
        return; // each call of another rank then fails
      fails = false;
      text = of_step();
      require(text == "rank 0: in the body", text);
    });
}

TEST_CASE("after an error every remote call of its body fails at once",
          "[runtime][R6]") {
  std::atomic<int> calls = 0;
  run_virtual_world(2, manual_world(), [&](session&) {
    distributed_model model{make_caller(
      [&](function_impl&, Tensor) -> Tensor {
        ++calls;
        throw std::runtime_error{"first"};
      },
      [](caller_impl& self, Tensor x) {
        for (int i = 0; i < 3; ++i)
          try {
            self.there(x);
          } catch (const error&) {
            // user code that goes on
          }
        return x;
      })};
    auto evaluate = step([&](Tensor x) { return model(x); });
    require(contains(error_of([&] {
                       evaluate(torch::ones({1, 3}));
                     }),
                     "first"),
            "first error");
  });
  CHECK(calls == 1);
}

TEST_CASE("a rank that dies ends the step of the others", "[runtime][R6]") {
  auto text = std::string{};
  std::mutex mutex;
  auto run = [&] {
    run_virtual_world(2, manual_world(), [&](session& s) {
      distributed_model model{make_caller()};
      auto evaluate = step([&](Tensor x) { return model(x); });
      evaluate(torch::ones({1, 3}));
      if (s.rank() == 1)
        throw std::runtime_error{"rank 1 gives up"};
      auto t = error_of([&] { evaluate(torch::ones({1, 3})); });
      auto again = error_of([&] { evaluate(torch::ones({1, 3})); });
      std::unique_lock guard{mutex};
      text = t + " / " + again;
    });
  };
  CHECK_THROWS_WITH(run(), ContainsSubstring("gives up"));
  CHECK_THAT(text, ContainsSubstring("rank 1"));
  CHECK(text.find("no error") == std::string::npos);
}

TEST_CASE("a session ends its waits when the SUPERVISOR is lost",
          "[runtime][R6]") {
  auto text = std::string{};
  auto run = [&] {
    run_virtual_world(2, manual_world(), [&](session& s) {
      distributed_model model{make_caller()};
      auto evaluate = step([&](Tensor x) { return model(x); });
      evaluate(torch::ones({1, 3}));
      if (s.rank() == 0)
        s.internals().rank_down(
          {error_code::rank_down, no_rank, {}, "the SUPERVISOR is lost"});
      // The other rank waits for this one and hears that it gave up.
      auto t = error_of([&] { evaluate(torch::ones({1, 3})); });
      if (s.rank() == 0)
        text = t;
      throw std::runtime_error{"no way on"};
    });
  };
  CHECK_THROWS(run());
  CHECK_THAT(text, ContainsSubstring("rank 1: the SUPERVISOR is lost"));
}

// -- gradients and optimizer --------------------------------------------------

TEST_CASE("averaging does not scale what was accumulated before",
          "[runtime][R15]") {
  run_virtual_world(2, manual_world(2, 4), [](session&) {
    distributed_model model{make_caller()};
    auto train_step = step([&](Tensor x) {
      auto loss = model(x).sum();
      model.backward(loss);
      return loss;
    });
    train_step(torch::ones({4, 3}));
    train_step(torch::ones({4, 3}));
    auto g = model.gradients();
    require(torch::allclose(g[1].second, torch::full({3}, 4.0)), "2 steps");
  });
}

namespace {

struct tied_impl : torch::nn::Module {
  tied_impl() : a(times_weight, torch::ones({3})), b(times_weight, a->weight) {
    register_module("a", a);
    register_module("b", b); // the same parameter under another name
    register_module("plain", plain);
  }
  Tensor forward(Tensor x) {
    return plain(b(a(x)));
  }
  submodule<function> a, b;
  torch::nn::Linear plain{3, 3};
};
TORCH_MODULE_IMPL(tied, tied_impl);

} // namespace

TEST_CASE("one tensor under two names is one parameter", "[runtime][R17]") {
  auto world = manual_world();
  world.config.auto_partition = true;
  run_virtual_world(2, world, [](session&) {
    distributed_model model{seeded([] { return tied{}; })};
    require(model->parameters().size() == 4, "torch lists it twice");
    torch::optim::SGD sgd{model->parameters(), torch::optim::SGDOptions(0.1)};
    distributed_optimizer optimizer{sgd};
    model.partition();
    auto state = model.state_dict();
    require(state.size() == 3, "the state has it once");
    auto& st = model.state().map();
    require(st.owner(module_id{1}) == st.owner(module_id{2}), "one owner");
    require(sgd.param_groups()[0].params().size()
              == model.local_parameters().size(),
            "the optimizer has what this rank owns, once");
    require(contains(model.partition_text(), "smp::submodule<"),
            "the print says how to free what cannot be intercepted");
    require(st.owner(module_id{3}) == st.owner(module_id{0}),
            "a plain Linear stays with its parent (R20)");
  });
}

TEST_CASE("an optimizer keeps its groups", "[runtime][R21]") {
  run_virtual_world(2, manual_world(), [](session& s) {
    distributed_model model{make_caller()};
    torch::optim::SGD sgd{
      {torch::optim::OptimizerParamGroup{
         {model->here}, std::make_unique<torch::optim::SGDOptions>(0.5)},
       torch::optim::OptimizerParamGroup{
         {model->there->weight},
         std::make_unique<torch::optim::SGDOptions>(0.25)}},
      torch::optim::SGDOptions(1)};
    distributed_optimizer optimizer{sgd};
    auto train_step = step([&](Tensor x) {
      auto loss = model(x).sum();
      model.backward(loss);
      return loss;
    });
    train_step(torch::ones({1, 3}));
    require(sgd.param_groups().size() == 2, "two groups");
    require(sgd.param_groups()[s.rank()].params().size() == 1
              && sgd.param_groups()[1 - s.rank()].params().empty(),
            "each rank has its own parameter");
    optimizer.step();
    auto state = model.state_dict();
    // d/dhere = x w = 1, d/dw = x here = 2
    require(torch::allclose(state[0].second, torch::full({3}, 1.5)), "here");
    require(torch::allclose(state[1].second, torch::full({3}, 0.5)), "there");
  });
}

TEST_CASE("clipping sees the gradients of all ranks", "[runtime][R22]") {
  run_virtual_world(2, manual_world(), [](session&) {
    distributed_model model{make_caller()};
    auto train_step = step([&](Tensor x) {
      auto loss = model(x).sum();
      model.backward(loss);
      return loss;
    });
    train_step(torch::ones({1, 3}));
    auto a = torch::ones({3}).requires_grad_(true);
    auto b = torch::ones({3}).requires_grad_(true);
    a.mutable_grad() = torch::full({3}, 1.0);
    b.mutable_grad() = torch::full({3}, 2.0);
    auto expected = torch::nn::utils::clip_grad_norm_({a, b}, 1.0);
    auto norm = clip_grad_norm_(model, 1.0);
    require(std::abs(norm - expected) < 1e-6, "norm");
    auto g = model.gradients();
    require(torch::allclose(g[0].second, a.grad())
              && torch::allclose(g[1].second, b.grad()),
            "scaled gradients");
    require(!any_nonfinite(model), "finite");
    for (auto& p : model.local_parameters())
      if (smp::pp_rank() == 1)
        p.mutable_grad()[0] = std::numeric_limits<double>::quiet_NaN();
    require(any_nonfinite(model), "NaN on rank 1 shows on both");
  });
}

// -- randomness and waiting ---------------------------------------------------

TEST_CASE("steps leave the caller's random numbers alone", "[runtime][R23]") {
  run_virtual_world(1, manual_world(1, 2), [](session&) {
    distributed_model model{make_caller()};
    model->there->smp_hook.pinned = 0;
    auto draw = step([&](Tensor x) { return x + torch::rand({1, 3}); });
    torch::manual_seed(3);
    auto expected = torch::rand({4});
    torch::manual_seed(3);
    auto y = draw(torch::zeros({2, 3})).concat();
    require(torch::equal(torch::rand({4}), expected), "own stream");
    torch::manual_seed(microbatch_seed(1, 1, 0, 1));
    require(torch::equal(y[1], torch::rand({3})), "the microbatch's stream");
  });
}

TEST_CASE("a body that waits gives its turn to others", "[runtime][R28]") {
  auto world = manual_world(1, 2);
  world.config.active_microbatches = 2;
  run_virtual_world(1, world, [](session& s) {
    distributed_model model{make_caller()};
    model->there->smp_hook.pinned = 0;
    auto self = rank_id{s.rank()};
    auto talk = step([&](Tensor x) {
      auto& names = s.internals().exchange();
      // Microbatch 0 waits for what microbatch 1 says.
      if (x.item<double>() == 0)
        names.receive(self, "test.talk");
      else
        names.send(self, "test.talk", {});
      return x;
    });
    auto y = talk(torch::arange(2.0).view({2, 1})).concat();
    require(y.size(0) == 2, "both ran");
  });
}

TEST_CASE("one execution runs at a time and contexts are few",
          "[runtime][R26]") {
  std::atomic<int> running = 0, most = 0;
  auto enter = [&](Tensor x) {
    x = x * 1; // waits here for a result that is not there yet
    auto now = ++running;
    most = std::max(most.load(), now);
    auto y = x * 2;
    --running;
    return y;
  };
  auto world = manual_world(2, 8);
  world.config.active_microbatches = 3;
  run_virtual_world(2, world, [&](session& s) {
    distributed_model model{make_caller(
      [&](function_impl& self, Tensor x) { return enter(x) * self.weight; },
      [&](caller_impl& self, Tensor x) {
        return enter(self.there(enter(x * self.here)));
      })};
    auto train_step = step([&](Tensor x) {
      auto loss = model(x).sum();
      model.backward(loss);
      return loss;
    });
    for (int i = 0; i < 3; ++i)
      train_step(torch::ones({8, 3}));
    auto status = s.internals().actors().status(std::chrono::seconds{10});
    require(status.contexts.size() <= 3 * 1 + 1, "contexts");
  });
  CHECK(most == 1);
}

TEST_CASE("ranks with different models refuse each other by name",
          "[runtime][model]") {
  CHECK_THROWS_WITH(
    run_virtual_world(
      2, manual_world(),
      [](session& s) {
        distributed_model model{caller{times_weight, call_there}};
        if (s.rank() == 1)
          model->register_buffer("extra", torch::ones({1}));
        model.partition();
      }),
    ContainsSubstring("model"));
}
