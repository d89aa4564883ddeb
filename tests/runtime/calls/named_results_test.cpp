#include "tests/support/catch.hpp"

#include "runtime/calls/named_results.hpp"

#include <torch/types.h>

// Results that are spoken of before they exist (R38, R39).

using namespace smp;

namespace {

const rank_id owner{1};

object_id name(uint32_t promise, uint64_t step = 1) {
  request_id asked{rank_id{0}, promise_number(step_id{step}, promise)};
  return result_name(owner, asked, step_id{step}, 0);
}

failure some_failure() {
  return {error_code::user_code, owner, "m", "boom"};
}

void put(named_results& x, object_id id, uint64_t microbatch = 0) {
  CHECK(x.put(id, microbatch_id{microbatch}, torch::ones({2}), {}).empty());
}

} // namespace

TEST_CASE("names tell who gave them and in which step", "[runtime][objects]") {
  auto x = name(5);
  CHECK(is_result_name(x));
  CHECK_FALSE(is_result_name({owner, 5, 1}));
  CHECK(x != name(6));
  CHECK(asked_for(x) == request_id{rank_id{0}, promise_number({}, 5)});
  // Promises and requests that are waited for are numbered apart.
  request_id waited{rank_id{0}, request_number(step_id{1}, 5)};
  auto y = result_name(owner, waited, step_id{1}, 0);
  CHECK(x != y);
  CHECK(asked_for(y) == without_step(waited));
  CHECK(long_name(short_name(y), rank_id{0}, step_id{1}) == y);
  request_id asked{rank_id{0}, promise_number(step_id{1}, 5)};
  CHECK(x != result_name(owner, asked, step_id{1}, 1));
  CHECK(x != result_name(rank_id{2}, asked, step_id{1}, 0));
  asked.origin = rank_id{2};
  CHECK(x != result_name(owner, asked, step_id{1}, 0));
  // Those of another step are called the same there.
  CHECK(x != name(5, 2));
  CHECK(in_step(x, step_id{2}) == name(5, 2));
  CHECK(long_name(short_name(x), rank_id{0}, step_id{1}) == x);
}

TEST_CASE("a rank that asks too early is told when the result comes",
          "[runtime][objects]") {
  named_results x;
  CHECK_FALSE(x.ask(rank_id{0}, name(1)));
  CHECK_FALSE(x.ask(rank_id{2}, name(1)));
  auto arrived = x.arrival(name(1));
  CHECK_FALSE(arrived->done());
  auto askers = x.put(name(1), microbatch_id{0}, torch::ones({2}), {});
  REQUIRE(askers.size() == 2);
  CHECK(askers[0].first == rank_id{0});
  CHECK(askers[1].second == name(1));
  CHECK(arrived->done());
  CHECK(x.arrival(name(1)) == nullptr);
  CHECK(x.find(name(1)).defined());
  auto late = x.ask(rank_id{3}, name(1));
  REQUIRE(late);
  CHECK(late->tensor.defined());
}

TEST_CASE("a failed step fails what is still to come, with the first cause",
          "[runtime][objects][R39]") {
  named_results x;
  put(x, name(1));
  x.ask(rank_id{0}, name(2));
  auto arrived = x.arrival(name(3));
  auto other = x.arrival(name(3, 2)); // of the next step
  auto askers = x.fail_step(step_id{1}, some_failure());
  REQUIRE(askers.size() == 1);
  CHECK(askers[0].second == name(2));
  CHECK(arrived->cause() == some_failure());
  CHECK_FALSE(other->done());
  CHECK(x.ask(rank_id{0}, name(4))->why == some_failure());
  CHECK(x.arrival(name(4))->cause() == some_failure());
  CHECK_FALSE(x.ask(rank_id{0}, name(1))->why); // it is here
  // What comes all the same is not kept.
  put(x, name(5));
  CHECK(x.size() == 1);
}

TEST_CASE("results go with their microbatch and with their step",
          "[runtime][objects]") {
  named_results x;
  put(x, name(1), 0);
  put(x, name(2), 1);
  put(x, name(3), 1);
  x.drop(name(2));
  CHECK(x.size() == 2);
  x.drop(step_id{1}, microbatch_id{0});
  CHECK(x.size() == 1);
  auto arrived = x.arrival(name(4));
  x.end_step(step_id{1});
  CHECK(x.size() == 0);
  CHECK(arrived->cause().code == error_code::cancelled);
  CHECK(x.ask(rank_id{0}, name(3))->why.code == error_code::protocol);
  put(x, name(6));
  CHECK(x.size() == 0);
  put(x, name(1, 2));
  CHECK(x.size() == 1);
}
