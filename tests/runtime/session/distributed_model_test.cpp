#include "tests/support/catch.hpp"

#include "tests/support/error_of.hpp"
#include "tests/support/torch/two_ranks.hpp"

#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>
#include <torch/utils.h>

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

using namespace smp;
using namespace smp::test;

// A trainer owns any of them as a base.
static_assert(std::has_virtual_destructor_v<distributed_model_base>);

namespace {

struct pair_impl : torch::nn::Module {
  pair_impl() {
    register_module("a", a);
    register_module("b", b);
    register_module("c", c);
    register_buffer("scale", torch::ones({}));
  }

  submodule<torch::nn::Linear> a{8, 8}, b{8, 4}, c{4, 1};
};
TORCH_MODULE_IMPL(pair, pair_impl);

/// Fails the rank, and so the test: Catch2's macros are for its own thread.
void require(bool x, const std::string& what) {
  if (!x)
    throw std::runtime_error{"not true: " + what};
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

/// Loads `wrong` on two ranks, and checks that nothing changed.
/// @returns the error
std::string refusal_of(distributed_model<pair>& model,
                       const named_tensors& wrong) {
  auto before = model.state_dict();
  std::string told = "no error";
  try {
    model.load_state_dict(wrong);
  } catch (const error& err) {
    require(err.code() == error_code::config, "the code");
    told = err.what();
  }
  auto after = model.state_dict();
  for (size_t i = 0; i < before.size(); ++i)
    require(torch::equal(before[i].second, after[i].second), before[i].first);
  return told;
}

template <class F>
void with_model(F f) {
  run_virtual_world(2, manual_world(), [&](session&) {
    auto made = seeded([] { return pair{}; });
    set_partition(*made->b, 1);
    distributed_model model{made};
    model.partition();
    f(model);
  });
}

} // namespace

TEST_CASE("a wrong state dict is refused as a whole, with all that is wrong",
          "[runtime][state]") {
  with_model([](auto& model) {
    auto wrong = model.state_dict();
    for (auto& [name, x] : wrong)
      x.zero_();
    wrong[1].first = "a.wieght";
    wrong[2].second = torch::ones({8, 1});
    wrong[3].second = torch::empty({4, 8}, torch::kMeta);
    wrong[4].second = Tensor{};
    wrong.erase(wrong.begin() + 5);
    auto told = refusal_of(model, wrong);
    require(told
              == "load_state_dict: 2 missing ('a.weight', 'c.weight'), 1 not "
                 "in the model ('a.wieght': did you mean 'a.weight'?), 1 of "
                 "another shape ('a.bias': [8, 1] instead of [8]), 2 "
                 "undefined, meta, sparse or quantised ('b.weight', 'b.bias'); "
                 "nothing was loaded",
            told);
  });
}

TEST_CASE("the error about a state dict has an end", "[runtime][state]") {
  with_model([](auto& model) {
    named_tensors wrong;
    for (int i = 0; i < 5000; ++i)
      wrong.emplace_back(std::string(500, 'x') + std::to_string(i),
                         torch::ones({1}));
    auto told = refusal_of(model, wrong);
    require(contains(told, "7 missing ('scale', ")
              && contains(told, "5000 not in the model")
              && contains(told, " and 4992 more)"),
            told);
    require(told.size() < 2000, "length");
  });
}

TEST_CASE("a state dict in any order is loaded", "[runtime][state]") {
  with_model([](auto& model) {
    auto xs = model.state_dict();
    for (auto& [name, x] : xs)
      x.fill_(static_cast<int64_t>(name.size()));
    model.load_state_dict({xs.rbegin(), xs.rend()});
    for (auto& [name, x] : model.state_dict())
      require(
        x.eq(static_cast<int64_t>(name.size())).all().template item<bool>(),
        name);
  });
}

TEST_CASE("a rank names what it owns, and all ranks together name all",
          "[runtime][state]") {
  std::mutex mutex;
  std::map<std::string, int> modules, tensors; // by name: how many ranks
  run_virtual_world(2, manual_world(), [&](session& s) {
    auto made = seeded([] { return pair{}; });
    set_partition(*made->b, 1);
    distributed_model model{made};
    // Before the partition everything is everybody's.
    require(model.local_modules().size() == 4, "all modules");
    require(model.local_parameters().size() == 6, "all parameters");
    require(model.local_buffers().size() == 1, "all buffers");
    model.partition();

    auto named = model.local_named_modules();
    auto names = model.local_module_names();
    auto objects = model.local_modules();
    require(named.size() == names.size() && named.size() == objects.size(),
            "as many names as modules");
    for (size_t i = 0; i < named.size(); ++i)
      require(named[i].first == names[i] && named[i].second == objects[i],
              "in the same order");
    auto is_there = [&](const std::shared_ptr<torch::nn::Module>& x) {
      return std::find(objects.begin(), objects.end(), x) != objects.end();
    };
    require(is_there(model->b.ptr()) == (s.rank() == 1)
              && is_there(model->a.ptr()) == (s.rank() == 0),
            "the objects of the model");

    auto own = s.rank() == 0
                 ? std::vector<Tensor>{model->a->weight, model->a->bias,
                                       model->c->weight, model->c->bias}
                 : std::vector<Tensor>{model->b->weight, model->b->bias};
    auto parameters = model.local_parameters();
    require(parameters.size() == own.size(), "own parameters");
    for (size_t i = 0; i < own.size(); ++i)
      require(parameters[i].is_same(own[i]), "the tensors of the model");
    require(model.local_buffers().size() == (s.rank() == 0 ? 1u : 0u),
            "own buffers");

    auto state = model.local_state_dict();
    std::unique_lock guard{mutex};
    for (auto& name : names)
      ++modules[name];
    for (auto& [name, x] : state) {
      ++tensors[name];
      require(x.defined() && x.storage().nbytes() > 0, name + " has bytes");
    }
  });
  CHECK(modules
        == std::map<std::string, int>{{"", 1}, {"a", 1}, {"b", 1}, {"c", 1}});
  CHECK(tensors
        == std::map<std::string, int>{{"a.bias", 1},
                                      {"a.weight", 1},
                                      {"b.bias", 1},
                                      {"b.weight", 1},
                                      {"c.bias", 1},
                                      {"c.weight", 1},
                                      {"scale", 1}});
}

TEST_CASE("what is said of a module after the partition is refused by name",
          "[runtime]") {
  using word = std::function<void(torch::nn::Module&)>;
  const std::vector<std::pair<std::string, word>> words{
    {"smp::set_partition", [](auto& x) { set_partition(x, 0); }},
    {"smp::set_stateful", [](auto& x) { set_stateful(x, "counts"); }},
    {"smp::set_tensor_parallelism", [](auto& x) { set_tensor_parallelism(x); }},
    {"smp::set_activation_checkpointing",
     [](auto& x) { set_activation_checkpointing(x); }}};
  with_model([&](auto& model) {
    torch::nn::Linear other{2, 2};
    for (auto& [name, say] : words) {
      auto told = error_of([&model, f = say] { f(*model->b); },
                           error_code::unsupported);
      require(told
                == "module b: " + name
                     + " has no effect once the model is partitioned: call it "
                       "before the first step, and before the model's "
                       "partition()",
              told);
      say(*other); // is not of that model
    }
  });
}

// -- complex parameters -------------------------------------------------------

namespace {

/// A filter in the frequency domain.
struct filter_impl : torch::nn::Module {
  explicit filter_impl(bool real) {
    auto x = torch::complex(torch::linspace(0.5, 1.5, 5),
                            torch::linspace(-1, 1, 5));
    weight = register_parameter("weight",
                                real ? torch::view_as_real(x).clone() : x);
  }
  Tensor forward(Tensor x) {
    auto w = weight.is_complex() ? weight : torch::view_as_complex(weight);
    return torch::fft_irfft(torch::fft_rfft(x) * w, 8);
  }
  Tensor weight;
};
TORCH_MODULE_IMPL(filter, filter_impl);

template <template <class> class P>
struct filtered_impl : torch::nn::Module {
  explicit filtered_impl(bool real) {
    partition_scope on_rank_1{1};
    in = P<filter>(real);
    register_module("in", in);
  }
  Tensor forward(Tensor x) {
    return in(x).square().mean();
  }
  P<filter> in{nullptr};
};
using filtered = torch::nn::ModuleHolder<filtered_impl<submodule>>;

} // namespace

TEST_CASE("a complex parameter is refused, and the advice leads to training",
          "[runtime][errors]") {
  auto x = torch::sin(torch::arange(16.)).view({2, 8});
  std::vector<double> expected;
  filtered_impl<as_is> alone{true};
  torch::optim::Adam adam{alone.parameters(), 0.1};
  for (int i = 0; i < 3; ++i) {
    adam.zero_grad();
    auto loss = alone.forward(x);
    loss.backward();
    adam.step();
    expected.push_back(loss.item<double>());
  }
  run_virtual_world(2, manual_world(2), [&](session&) {
    distributed_model refused{filtered{false}};
    auto why = error_of([&] { refused.partition(); });
    require(contains(why, "parameter 'in.weight' is complex"), why);
  });
  run_virtual_world(2, manual_world(2), [&](session&) {
    distributed_model model{filtered{true}};
    torch::optim::Adam mine{model->parameters(), 0.1};
    distributed_optimizer optimizer{mine};
    auto train = step([&](Tensor y) {
      auto loss = model(y);
      model.backward(loss);
      return loss;
    });
    for (auto y : expected) {
      optimizer.zero_grad();
      auto loss = train(x).reduce_mean().template item<double>();
      require(std::abs(loss - y) < 1e-6, "the loss of one process");
      optimizer.step();
    }
  });
}
