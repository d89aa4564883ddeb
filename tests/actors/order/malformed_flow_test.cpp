#include "tests/support/catch.hpp"

#include "actors/order/computed_order.hpp"
#include "actors/order/step_flow.hpp"
#include "tests/support/error_of.hpp"

#include <vector>

// What a rank tells of a step, and what pp_rank 0 decides from it, may be
// anything: an error says who sent what makes no sense.

using namespace smp;
using namespace smp::test;
using Catch::Matchers::EndsWith;
using Catch::Matchers::StartsWith;

TEST_CASE("a flow that no rank has names the rank that told it",
          "[actors][static][deterministic]") {
  step_flow x;
  x.microbatches = 1;
  auto& y = x.executions.emplace_back();
  y.calls.resize(2);
  y.calls[1].number = 1;
  auto refused = [&x] {
    return error_of([&x] { record_of(x, {2}, 1); }, error_code::protocol);
  };
  CHECK_NOTHROW(record_of(x, {2}, 1));
  SECTION("an execution twice") {
    auto again = y;
    again.calls.clear();
    x.executions.push_back(again);
    CHECK(refused()
          == "rank 2: malformed flow: an execution is there twice, or of no "
             "microbatch");
  }
  SECTION("a microbatch that is not there") {
    y.microbatch = microbatch_id{1};
    CHECK(refused()
          == "rank 2: malformed flow: an execution is there twice, or of no "
             "microbatch");
  }
  SECTION("more microbatches than memory holds") {
    x.microbatches = ~uint64_t{0};
    CHECK_THAT(refused(), EndsWith(" microbatches in a step of 1"));
  }
  SECTION("calls that would go round for ever") {
    y.calls[1].number = 0;
    CHECK(refused() == "rank 2: malformed flow: two calls have the number 0");
  }
  SECTION("a grant that nobody gives") {
    y.calls[1].kind = call_kind::grant;
    CHECK(refused()
          == "rank 2: malformed flow: an execution that is not a step body "
             "waits for a grant");
  }
}

TEST_CASE("an order that serves what no rank did names who decided it",
          "[actors][static][deterministic]") {
  std::vector<step_record> ranks(2);
  auto& e = ranks[1].executions.emplace_back();
  e.calls.emplace_back(); // ends a segment
  pipeline_order x;
  x.served.resize(2);
  x.served[1] = {{0, 0}, {0, 1}};
  auto refused = [&] {
    return error_of(
      [&] {
        likeness_of(x, ranks, {{4}, {5}});
      },
      error_code::protocol);
  };
  CHECK_NOTHROW(likeness_of(x, ranks, {{4}, {5}}));
  SECTION("an execution that is not there") {
    x.served[1][1] = {1, 0};
  }
  SECTION("a segment that is not there") {
    x.served[1][1].segment = 2;
  }
  SECTION("one twice") {
    x.served[1][1] = x.served[1][0];
  }
  SECTION("one too few") {
    x.served[1].pop_back();
  }
  SECTION("a rank too many") {
    x.served.emplace_back();
  }
  SECTION("a rank too few") {
    x.served.pop_back();
  }
  CHECK_THAT(refused(), StartsWith("rank 4: malformed order: "));
}
