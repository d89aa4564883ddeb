#include "tests/support/catch.hpp"

#include "runtime/launch/restart_policy.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <string>
#include <vector>

using namespace smp;
using namespace std::chrono_literals;
using Catch::Matchers::ContainsSubstring;

namespace {

failure lost(const std::string& text = "killed") {
  return {error_code::rank_down, rank_id{1}, {}, text};
}

/// The loss of a rank in the step after these.
attempt_end after(uint64_t steps, const std::string& text = "killed") {
  return {.cause = lost(text), .steps = steps, .made_steps = true};
}

struct row {
  const char* what;
  attempt_end end;
  bool first, later; // whether it is started again
};
const std::vector<row> rows{
  {"it is done", {}, false, false},
  {"a signal", {.cause = lost()}, true, true},
  {"a signal after steps", after(5), true, true},
  {"a wrong configuration", {.cause = lost(), .code = 2}, false, false},
  {"data that changed in the run",
   {.cause = lost(), .code = 2, .steps = 5, .made_steps = true},
   false,
   false},
  {"numbers",
   {.cause = lost(), .code = 5, .steps = 5, .made_steps = true},
   false,
   false},
  {"a rank is interrupted",
   {.cause = lost(), .code = 130, .steps = 5, .made_steps = true},
   false,
   false},
  {"Ctrl-C",
   {.cause = lost(), .interrupted = true, .steps = 5, .made_steps = true},
   false,
   false},
  {"a silent rank", {.cause = lost(), .code = 4}, true, true},
  {"a deadlock", {.cause = lost(), .code = 4, .deadlock = true}, false, false},
  {"an error before the first step", {.cause = lost(), .code = 3}, false, true},
  {"an error in a step",
   {.cause = lost(), .code = 3, .steps = 5, .made_steps = true},
   true,
   true},
  {"an end of its own before the first step",
   {.cause = lost(), .early = true},
   false,
   true},
  {"an end of its own in a step",
   {.cause = lost(), .early = true, .steps = 5, .made_steps = true},
   true,
   true},
};

} // namespace

TEST_CASE("a run whose rank is lost is started again, and no other",
          "[runtime][launch][restarts]") {
  for (auto& x : rows) {
    INFO(x.what);
    restart_policy first{3}, later{3}, none{0};
    CHECK(first.decide(x.end).again == x.first);
    REQUIRE(later.decide(after(0)).again);
    auto next = later.decide(x.end);
    CHECK(next.again == x.later);
    CHECK(next.why_not.empty());
    CHECK_FALSE(none.decide(x.end).again);
    CHECK(none.decide(x.end).why_not.empty());
  }
}

TEST_CASE("waits grow until a run gets further",
          "[runtime][launch][restarts]") {
  restart_policy x{100};
  auto wait = [&](uint64_t steps) {
    auto next = x.decide(after(steps));
    REQUIRE(next.again);
    return next.wait / 1s;
  };
  std::vector<long> waits;
  for (uint64_t steps : {50, 50, 49, 48, 49, 47, 46, 45, 48, 51, 50, 60, 61})
    waits.push_back(wait(steps));
  CHECK(waits == std::vector<long>{1, 2, 4, 8, 16, 32, 60, 60, 60, 1, 2, 1, 1});
  CHECK(x.restarts() == 13);
}

TEST_CASE("the third fault at one place ends the run, with the first cause",
          "[runtime][launch][restarts]") {
  restart_policy x{100};
  REQUIRE(x.decide(after(7, "killed")).again);
  REQUIRE(x.decide(after(12, "aborted")).again);
  REQUIRE(x.decide(after(7, "killed")).again); // before that place
  REQUIRE(x.decide(after(12, "lost")).again);
  auto end = x.decide(after(12, "lost"));
  CHECK_FALSE(end.again);
  CHECK(end.why_not
        == "not started again: 3 times after 12 steps, and none got further; "
           "the first time rank 1: aborted");
  // One step more, and the count is another one.
  restart_policy y{100};
  for (uint64_t steps : {7, 7, 8, 8, 9, 9})
    CHECK(y.decide(after(steps)).again);
  CHECK_FALSE(y.decide(after(9)).again);
}

TEST_CASE("a run is started again as often as it may be",
          "[runtime][launch][restarts]") {
  restart_policy x{2};
  CHECK(x.decide(after(1)).again);
  CHECK(x.decide(after(2)).again);
  auto end = x.decide(after(3));
  CHECK_FALSE(end.again);
  CHECK_THAT(end.why_not, ContainsSubstring("2 of 2 restarts are made"));
}

TEST_CASE("machines that are left share the ranks that the run can use",
          "[launch][restarts]") {
  // Whole replicas of two ranks, never six.
  const rank_limit pairs = [](uint64_t x) { return x == 6 ? 4 : x - x % 2; };
  using numbers = std::vector<uint64_t>;
  struct row {
    numbers all, here, shares;
  };
  const std::vector<row> rows{
    {{2, 2}, {0, 1}, {2, 2}},
    {{2, 2}, {1, 0}, {2, 2}},
    {{2, 2}, {0}, {2, 0}},
    {{1, 1}, {0}, {1, 1}}, // no replica is left: waits for the other one
    {{1, 1, 1}, {0, 2}, {1, 0, 1}},
    {{1, 1, 1, 1}, {0, 1, 3}, {1, 1, 0, 0}}, // one has nothing to do
    {{3, 1, 4}, {0, 1}, {3, 1, 0}},
    {{3, 3, 2}, {0, 1}, {3, 1, 0}},
  };
  for (auto& x : rows) {
    INFO(
      fmt::format("{} of {}", fmt::join(x.here, ","), fmt::join(x.all, ",")));
    CHECK(shares_among(x.all, x.here, pairs) == x.shares);
    CHECK(shares_among(x.all, x.here, nullptr) == x.all);
  }
}

TEST_CASE("a run starts again for machines that are of use to it, once",
          "[launch][restarts]") {
  const rank_limit fours = [](uint64_t x) { return x - x % 4; };
  const std::vector<uint64_t> all(8, 1);
  late_machines x{all, {1, 1, 1, 1, 0, 0, 0, 0}, fours};
  // In any order, also those that have ranks.
  for (uint64_t machine : {4, 1, 0, 5, 6, 2, 3, 9}) {
    INFO(machine);
    CHECK_FALSE(x.note(machine));
    CHECK(!x.get());
  }
  CHECK(x.note(7));
  CHECK(x.get() == 7);
  CHECK_FALSE(x.note(7));
  // Where all have ranks, or must have, nobody is late.
  late_machines whole{all, all, fours};
  late_machines rigid{all, all, nullptr};
  for (uint64_t machine = 0; machine < 8; ++machine) {
    CHECK_FALSE(whole.note(machine));
    CHECK_FALSE(rigid.note(machine));
  }
}
