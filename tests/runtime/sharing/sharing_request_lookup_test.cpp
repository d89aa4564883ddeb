#include "tests/support/catch.hpp"

#include "smp/nn.hpp"
#include "tests/support/assertion_lock.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/torch/numbers.hpp"
#include "tests/support/torch/training_step.hpp"
#include "tests/support/torch/two_ranks.hpp"

#include <functional>
#include <string>
#include <vector>

// Layers of one model that tensor-parallel ranks share in different ways, as
// code says of each.

using namespace smp;
using namespace smp::test;
using Catch::Matchers::ContainsSubstring;

namespace {

constexpr int64_t width = 8;
constexpr int64_t tokens = 3;
constexpr int64_t rows = 4;

using layer = submodule<smp::nn::distributed_transformer_layer>;

smp::nn::transformer_layer_arguments small() {
  smp::nn::transformer_layer_arguments x;
  x.num_attention_heads = 2;
  x.attention_head_size = width / 2;
  x.hidden_size = width;
  x.intermediate_size = 2 * width;
  x.attention_dropout_prob = x.hidden_dropout_prob = 0;
  return x;
}

layer made_for_speed() {
  tensor_parallelism_scope share{true, {.optimize = "speed"}};
  tensor_parallelism_scope inner; // which does not say how
  return layer{small()};
}

struct stack_impl : torch::nn::Module {
  stack_impl() {
    register_module("first", first);
    register_module("second", second);
    register_module("third", third);
    register_module("fourth", fourth);
  }

  /// x: [N, tokens, width] @returns the loss
  Tensor forward(Tensor x) {
    auto y = fourth(third(second(first(smp::nn::layer_states{x})))).at(0);
    // The mean square of what is normed alone would never change.
    return (y * torch::linspace(-1, 1, width, x.options())).square().mean();
  }

  layer first{small()}, second{small()}, third{small()};
  layer fourth = made_for_speed();
};
TORCH_MODULE_IMPL(stack, stack_impl);

stack make_stack() {
  return seeded([] {
    stack result;
    result->to(torch::kDouble);
    return result;
  });
}

Tensor data() {
  return torch::linspace(-1, 1, rows * tokens * width, torch::kDouble)
    .view({rows, tokens, width})
    .sin();
}

numbers gradients_alone() {
  auto model = make_stack();
  model->forward(data()).backward();
  numbers result;
  for (auto& p : model->named_parameters())
    result.emplace(p.key(), p.value().grad());
  return result;
}

virtual_world_options two_sharing(const std::string& optimize,
                                  const std::vector<std::string>& modules) {
  virtual_world_options result;
  result.config.tensor_parallel_modules = modules;
  result.config.tensor_parallel_degree = 2;
  result.config.optimize = optimize;
  result.config.ddp = true;
  result.config.threads = 1;
  result.reorder = true;
  return result;
}

/// Trains as one process does.
/// @param mark is called on rank 0 only, which decides for all
/// @param modules that the configuration names
/// @returns the partition print
std::string train(const std::string& optimize,
                  const std::function<void(stack_impl&)>& mark,
                  const std::vector<std::string>& modules = {}) {
  auto expected = gradients_alone();
  std::string text;
  run_virtual_world(2, two_sharing(optimize, modules), [&](session& s) {
    auto made = make_stack();
    if (s.rank() == 0)
      mark(*made);
    distributed_model model{made};
    auto train_step = training_step(model);
    train_step(data().chunk(2).at(dp_rank()));
    auto gradients = model.gradients();
    assertion_lock held;
    check_near({gradients.begin(), gradients.end()}, expected);
    if (s.rank() == 0)
      text = model.partition_text();
  });
  return text;
}

std::string line(const std::string& how, const std::string& modules) {
  return "\nTransformerLayer shared by 2 ranks for " + how + ": " + modules
         + "\n";
}

/// What was wrapped, too.
std::string in_one_line(std::string x) {
  for (size_t at = 0; (at = x.find("\n  ", at)) != x.npos;)
    x.replace(at, x.find_first_not_of(' ', at + 1) - at, " ");
  return x;
}

} // namespace

TEST_CASE("a layer for speed and one for memory compute what one process does",
          "[runtime][tensor_parallel][R50]") {
  auto mark = [](stack_impl& x) {
    set_tensor_parallelism(*x.first, true, {.optimize = "speed"});
    set_tensor_parallelism(*x.second, true, {.optimize = "memory"});
  };
  CHECK_THAT(train("memory", mark),
             ContainsSubstring(line("speed", "first, fourth"))
               && ContainsSubstring(line("memory", "second, third")));
  CHECK_THAT(train("speed", mark),
             ContainsSubstring(line("speed", "first, third, fourth"))
               && ContainsSubstring(line("memory", "second")));
}

TEST_CASE("how a layer is shared is what the nearest word above it says",
          "[runtime][tensor_parallel]") {
  auto text = train("memory", [](stack_impl& x) {
    set_tensor_parallelism(x, true, {.optimize = "speed"});
    set_tensor_parallelism(*x.second, true, {.optimize = "memory"});
    set_tensor_parallelism(*x.third); // says nothing of it
    set_tensor_parallelism(*x.fourth, true, {.optimize = "memory"});
  });
  CHECK_THAT(text, ContainsSubstring(line("speed", "first, third"))
                     && ContainsSubstring(line("memory", "second, fourth")));
}

TEST_CASE("a layer that a configuration leaves out is not shared",
          "[runtime][tensor_parallel]") {
  // Also of those that need not be named, but for what code says.
  auto text = train("memory",
                    [](stack_impl& x) { set_tensor_parallelism(*x.third); },
                    {"*", "!second", "!third"});
  CHECK_THAT(text, ContainsSubstring(line("memory", "first, third"))
                     && ContainsSubstring(line("speed", "fourth"))
                     && !ContainsSubstring(": second"));
}

TEST_CASE("a layer is not shared as a whole if a part of it is left out",
          "[runtime][tensor_parallel]") {
  auto check = [](const std::string& text, const std::string& why) {
    CHECK_THAT(text,
               ContainsSubstring(line("memory", "first, third"))
                 && ContainsSubstring("\nTransformerOutputLayer shared by 2 "
                                      "ranks for memory: second.output\n")
                 && !ContainsSubstring("\nAttentionLayer shared"));
    CHECK_THAT(in_one_line(text),
               ContainsSubstring("TransformerLayer not shared, as "
                                 "'second.attention' in it is excluded: "
                                 + why + ": second"));
  };
  check(train("memory", [](auto&) {}, {"*", "!second.attention"}),
        "\"!second.attention\" in tensor_parallel.modules excludes it");
  check(train("memory",
              [](stack_impl& x) {
                set_tensor_parallelism(*x.second->attention, false);
              }),
        "the program says so");
}

TEST_CASE("another word than speed or memory is an error at once",
          "[runtime][tensor_parallel]") {
  std::vector<std::string> told;
  run_virtual_world(1, {}, [&](session&) {
    torch::nn::Module x;
    told = {
      error_of([&] { set_tensor_parallelism(x, true, {.optimize = "fast"}); }),
      error_of(
        [&] { set_tensor_parallelism(x, false, {.optimize = "speed"}); }),
      error_of([] {
        tensor_parallelism_scope{true, {.optimize = "fast"}};
      })};
  });
  CHECK_THAT(told.at(0), ContainsSubstring("optimize is \"fast\"; write "
                                           "\"memory\" or \"speed\""));
  CHECK_THAT(told.at(1), ContainsSubstring("optimize has no effect"));
  CHECK(told.at(2) == told.at(0));
}
