#include "tests/support/catch.hpp"

#include "actors/stalls/branches.hpp"
#include "actors/stalls/stall_judge.hpp"
#include "tests/support/reworded.hpp"

#include <optional>
#include <vector>

// Who called which shared module how often, where nothing can go on (R31).

using namespace smp;
using namespace std::chrono_literals;
using Catch::Matchers::ContainsSubstring;

namespace {

/// Ranks 0 and 1 share modules: one waits in 'left', the other one in 'tail'.
std::vector<rank_view> two_branches() {
  std::vector<rank_view> result;
  for (uint64_t i = 0; i < 2; ++i) {
    rank_view x;
    x.rank = rank_id{i};
    x.complete = x.settled = true;
    x.sharers = {rank_id{0}, rank_id{1}};
    x.shared = {{"up", microbatch_id{1}, phase::forward, 1, false, {}},
                {i == 0 ? "left" : "tail",
                 microbatch_id{1},
                 phase::forward,
                 1,
                 true,
                 {i == 0 ? "left/a7.0" : "tail/b8.0"}},
                {"up", microbatch_id{2}, phase::forward, i, i == 1, {}}};
    activity main;
    main.subject.what = wait_subject::kind::step_end;
    main.ends_step = true;
    activity context;
    context.who = activity::kind::context;
    context.subject = {.what = wait_subject::kind::collective,
                       .name = i == 0 ? "left/a7.0" : "tail/b8.0",
                       .group = x.sharers};
    context.from = rank_id{1 - i};
    x.activities = {main, context};
    result.push_back(x);
  }
  return result;
}

/// @returns the verdict, after a check that no text changes it
failure verdict(const std::vector<rank_view>& views) {
  auto result = different_branches(views);
  for (uint32_t seed = 0; seed < 20; ++seed)
    CHECK(different_branches(reworded(views, seed)) == result);
  return result;
}

} // namespace

TEST_CASE("different branches are told with microbatch, modules and counts",
          "[actors][stalls][R31]") {
  auto x = verdict(two_branches());
  CHECK(x.code == error_code::user_code);
  CHECK(x.module == "left");
  CHECK_THAT(x.text,
             ContainsSubstring("in microbatch 1, 'left', forward, was called "
                               "once by rank 0 and never by rank 1; 'tail', "
                               "forward, was called once by rank 1 and never "
                               "by rank 0: "));
}

TEST_CASE("a rank that ended the step calls nothing any more",
          "[actors][stalls][R31]") {
  auto views = two_branches();
  views[1].shared = {{"up", microbatch_id{1}, phase::forward, 1, false, {}}};
  views[1].activities.resize(1);
  views[1].activities[0].subject = {.what = wait_subject::kind::exchange,
                                    .name = "of any name"};
  CHECK_THAT(verdict(views).text,
             ContainsSubstring("in microbatch 1, 'left', forward, was called "
                               "once by rank 0 and never by rank 1: "));
}

TEST_CASE("equal counts are told as calls that differ",
          "[actors][stalls][R31]") {
  auto views = two_branches();
  views[1].shared[1].module = "left";
  CHECK_THAT(verdict(views).text,
             ContainsSubstring("'left', forward, was called once by ranks 0 "
                               "and 1, but not in the same way: "));
}

TEST_CASE("ranks that wait for something else did not take other branches",
          "[actors][stalls][R31]") {
  auto views = two_branches();
  auto& in_step = views[1].activities[1].subject;
  SECTION("a collective of the user's") {
    in_step.name = "world";
  }
  SECTION("one of its name among other ranks") {
    in_step.group = {rank_id{1}, rank_id{2}};
  }
  SECTION("an exchange") {
    in_step.what = wait_subject::kind::exchange;
  }
  SECTION("outside of the step") {
    views[1].activities[0].subject = {.what = wait_subject::kind::collective,
                                      .name = "world",
                                      .group = views[1].sharers};
    views[1].activities[0].ends_step = false;
  }
  SECTION("who executes") {
    views[1].activities[1].executes = true;
  }
  SECTION("nobody shares") {
    for (auto& x : views)
      x.shared.clear();
  }
  SECTION("peers are there") {
    for (auto& x : views)
      for (auto& y : x.shared)
        y.waits = false;
  }
  CHECK_FALSE(verdict(views));
}

TEST_CASE("the step fails, once, and the run goes on",
          "[actors][stalls][R31]") {
  stall_judge::time_point now{};
  stall_judge judge{2, {}, now};
  auto views = two_branches();
  auto turns = [&](int n) {
    std::optional<stall_report> result;
    for (int i = 0; i < n && !result; ++i) {
      now += 200ms;
      for (auto& x : views)
        judge.heard(x.rank, x.progress, now);
      if (judge.wants_views(now))
        result = judge.judge(views, now);
    }
    return result;
  };
  auto first = turns(10);
  REQUIRE(first);
  CHECK(first->deadlock);
  CHECK_FALSE(first->ends);
  CHECK(first->step_fails);
  CHECK_FALSE(turns(100)); // they are told
  for (auto& x : views)
    x.progress += 10;
  auto second = turns(10);
  REQUIRE(second);
  CHECK(second->step_fails);
  SECTION("another deadlock still ends the run") {
    for (auto& x : views) {
      x.progress += 10;
      x.shared.clear();
    }
    auto third = turns(10);
    REQUIRE(third);
    CHECK(third->ends);
    CHECK_FALSE(third->step_fails);
  }
}
