#include "tests/support/catch.hpp"

#include "runtime/execution/saved_calls.hpp"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/function.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>

// What an owner keeps of its calls, by step, microbatch and call.

using namespace smp;

namespace {

constexpr step_id third{3};
constexpr microbatch_id first{0}, second{1};
constexpr module_id norm{7};

request_id numbered(uint64_t number) {
  return {rank_id{1}, number};
}

std::shared_ptr<saved_call> call_of(std::string module) {
  auto result = std::make_shared<saved_call>();
  result->module = std::move(module);
  return result;
}

module_state state_of(double x) {
  module_state result;
  result.tensors.emplace_back(4, at::full({2}, x));
  return result;
}

/// Runs `f` when its graph is destroyed.
struct last_words : torch::autograd::Node {
  explicit last_words(std::function<void()> x) : f(std::move(x)) {
    // nop
  }

  ~last_words() override {
    f();
  }

  torch::autograd::variable_list
  apply(torch::autograd::variable_list&&) override {
    return {};
  }

  std::function<void()> f;
};

} // namespace

TEST_CASE("a saved call is taken once, or left for another backward",
          "[runtime][saved_calls]") {
  saved_calls calls;
  calls.put(third, first, numbered(5), call_of("a"));
  calls.put(third, first, numbered(6), call_of("b"));
  calls.put(third, second, numbered(5), call_of("c"));
  CHECK(calls.size() == 3);
  auto kept = calls.take(third, first, numbered(5), true);
  REQUIRE(kept);
  CHECK(kept->module == "a");
  CHECK(calls.take(third, first, numbered(5), false) == kept);
  CHECK_FALSE(calls.take(third, first, numbered(5), false));
  CHECK(calls.size() == 2);
  auto other = calls.take(third, second, numbered(5), false);
  REQUIRE(other);
  CHECK(other->module == "c");
}

TEST_CASE("nothing is saved under the name of another step, microbatch or call",
          "[runtime][saved_calls]") {
  saved_calls calls;
  calls.put(third, first, numbered(5), call_of("a"));
  CHECK_FALSE(calls.take(step_id{4}, first, numbered(5), false));
  CHECK_FALSE(calls.take(third, second, numbered(5), false));
  CHECK_FALSE(calls.take(third, first, numbered(6), false));
  CHECK_FALSE(calls.take(third, first, {rank_id{2}, 5}, false));
  CHECK(calls.size() == 1);
}

TEST_CASE("what a call found is kept by its path and module, and the first one",
          "[runtime][saved_calls][R52]") {
  saved_calls calls;
  calls.put_state(third, first, 42, norm, state_of(1));
  calls.put_state(third, first, 42, norm, state_of(2));
  auto kept = calls.state(third, first, 42, norm);
  REQUIRE(kept);
  REQUIRE(kept->tensors.size() == 1);
  CHECK(kept->tensors[0].first == 4);
  CHECK(at::equal(kept->tensors[0].second, at::full({2}, 1.0)));
  CHECK_FALSE(calls.state(third, second, 42, norm));
  CHECK_FALSE(calls.state(third, first, 43, norm));
  CHECK_FALSE(calls.state(third, first, 42, module_id{8}));
}

TEST_CASE("a microbatch leaves nothing of its own behind",
          "[runtime][saved_calls]") {
  saved_calls calls;
  for (auto m : {first, second}) {
    calls.put(third, m, numbered(5), call_of("a"));
    calls.put_state(third, m, 42, norm, state_of(1));
  }
  calls.drop(third, first);
  CHECK(calls.size() == 1);
  CHECK_FALSE(calls.take(third, first, numbered(5), true));
  CHECK_FALSE(calls.state(third, first, 42, norm));
  CHECK(calls.take(third, second, numbered(5), true));
  CHECK(calls.state(third, second, 42, norm));
  calls.clear();
  CHECK(calls.size() == 0);
  CHECK_FALSE(calls.state(third, second, 42, norm));
}

TEST_CASE("a graph may ask for saved calls while it is destroyed",
          "[runtime][saved_calls]") {
  saved_calls calls;
  size_t left = 99;
  auto saved = call_of("a");
  saved->outputs.emplace_back(
    std::make_shared<last_words>([&] { left = calls.size(); }), 0);
  calls.put(third, first, numbered(5), std::move(saved));
  calls.put(third, second, numbered(5), call_of("b"));
  SECTION("with its microbatch") {
    calls.drop(third, first);
    CHECK(left == 1);
  }
  SECTION("with all of them") {
    calls.clear();
    CHECK(left == 0);
  }
}
