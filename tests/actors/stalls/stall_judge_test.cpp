#include "tests/support/catch.hpp"

#include "actors/stalls/stall_judge.hpp"
#include "tests/support/reworded.hpp"

#include <optional>
#include <set>
#include <vector>

using namespace smp;
using namespace std::chrono_literals;

// When a stall is one: plain calls, time by hand.

namespace {

using time_point = stall_judge::time_point;

/// Two ranks that wait for each other in exchanges of different names.
struct run {
  explicit run(stall_options options = {}) : judge(2, options, now) {
    for (uint64_t i = 0; i < 2; ++i) {
      views[i].rank = rank_id{i};
      views[i].complete = true;
      views[i].settled = true;
      views[i].progress = 10;
      views[i].peers = {{rank_id{1 - i}, 4, 4, 0}};
      activity x;
      x.waits_for = "exchange \"x\"";
      x.from = rank_id{1 - i};
      views[i].activities = {x};
    }
  }

  /// One turn of a monitor: both ranks answer, then all of them is seen.
  std::optional<stall_report> turn(std::chrono::milliseconds pause = 200ms) {
    now += pause;
    for (auto& x : views)
      if (!silent.count(x.rank))
        judge.heard(x.rank, x.progress, now);
    if (!judge.wants_views(now))
      return std::nullopt;
    ++looks;
    std::vector<rank_view> seen;
    for (auto& x : views)
      if (!silent.count(x.rank))
        seen.push_back(x);
    auto other = judge;
    auto told = other.judge(reworded(seen, static_cast<uint32_t>(looks)), now);
    auto result = judge.judge(std::move(seen), now);
    REQUIRE(told.has_value() == result.has_value());
    if (result) {
      CHECK(told->deadlock == result->deadlock);
      CHECK(told->ends == result->ends);
      CHECK(told->step_fails == result->step_fails);
      CHECK(told->culprit == result->culprit);
    }
    return result;
  }

  /// @returns the first report within so many turns, and its turn.
  std::optional<stall_report> turns(int n) {
    for (count = 1; count <= n; ++count)
      if (auto x = turn())
        return x;
    return std::nullopt;
  }

  void execute(uint64_t rank) {
    views[rank].settled = false;
    views[rank].activities[0].executes = true;
  }

  time_point now{};
  stall_judge judge;
  std::vector<rank_view> views{2};
  std::set<rank_id> silent;
  int looks = 0;
  int count = 0;
};

} // namespace

TEST_CASE("a deadlock is seen at once", "[actors][stalls]") {
  run r;
  auto x = r.turns(10);
  REQUIRE(x);
  CHECK(x->deadlock);
  CHECK(x->ends);
  CHECK(r.count <= 3); // the numbers, then twice all
  CHECK_THAT(x->text, Catch::Matchers::ContainsSubstring("cycle: rank 0"));
  CHECK_FALSE(r.turns(1000)); // told once
}

TEST_CASE("a rank that executes is not in a deadlock, however long it takes",
          "[actors][stalls]") {
  run r{{.timeout = 1e9}};
  r.execute(1);
  CHECK_FALSE(r.turns(10000));
}

TEST_CASE("a message on its way is not a deadlock", "[actors][stalls]") {
  run r{{.timeout = 1e9}};
  r.views[0].peers[0].sent = 5;
  CHECK_FALSE(r.turns(1000));
  SECTION("unless it was dropped on arrival") {
    r.views[1].refused = 1;
    r.views[1].progress = 11;
    auto x = r.turns(10);
    REQUIRE(x);
    CHECK(x->deadlock);
  }
}

TEST_CASE("two looks with progress between them prove nothing",
          "[actors][stalls]") {
  run r{{.timeout = 1e9}};
  for (int i = 0; i < 100; ++i) {
    CHECK_FALSE(r.turn());
    CHECK_FALSE(r.turn());
    ++r.views[i % 2].progress;
  }
}

TEST_CASE("a rank whose actors do not answer is not settled",
          "[actors][stalls]") {
  run r{{.timeout = 1e9}};
  r.views[1].complete = false;
  CHECK_FALSE(r.turns(1000));
}

TEST_CASE("a long execution is reported after the timeout and each doubling",
          "[actors][stalls]") {
  run r{{.timeout = 10}};
  r.execute(1);
  std::vector<int> when;
  for (int i = 1; i <= 500; ++i) // 100 s
    if (auto x = r.turn()) {
      when.push_back(i / 5);
      CHECK_FALSE(x->deadlock);
      CHECK_FALSE(x->ends);
      CHECK(x->culprit == rank_id{1});
    }
  CHECK(when == std::vector<int>{10, 20, 40, 80});
  CHECK(r.looks < 40); // and it asks for little meanwhile
}

TEST_CASE("progress begins the time anew", "[actors][stalls]") {
  run r{{.timeout = 10}};
  r.execute(1);
  for (int i = 0; i < 1000; ++i) {
    if (i % 40 == 0)
      ++r.views[1].progress;
    CHECK_FALSE(r.turn());
  }
}

TEST_CASE("a long execution ends the run only where that is asked for",
          "[actors][stalls]") {
  run r{{.timeout = 10, .end = true}};
  r.execute(1);
  auto x = r.turns(100);
  REQUIRE(x);
  CHECK(x->ends);
  CHECK_FALSE(x->deadlock);
  CHECK_FALSE(r.turns(1000));
}

TEST_CASE("a silent rank is reported after the timeout, and no deadlock",
          "[actors][stalls]") {
  run r{{.timeout = 2}};
  r.silent = {rank_id{0}};
  auto x = r.turns(100);
  REQUIRE(x);
  CHECK_FALSE(x->deadlock);
  CHECK(x->culprit == rank_id{0});
  CHECK(x->silent == std::vector<rank_id>{rank_id{0}});
  CHECK(r.count <= 11);
}

TEST_CASE("ranks that only compute are not stalled", "[actors][stalls]") {
  run r{{.timeout = 1}};
  r.execute(0);
  r.execute(1);
  CHECK_FALSE(r.turns(1000));
}

TEST_CASE("a run whose ranks leave is not stalled", "[actors][stalls]") {
  run r{{.timeout = 1}};
  r.views[1].left = true;
  CHECK_FALSE(r.turns(1000));
}

TEST_CASE("a run that goes on is asked for one number of each rank",
          "[actors][stalls]") {
  run r;
  for (int i = 0; i < 1000; ++i) {
    ++r.views[0].progress;
    CHECK_FALSE(r.turn());
  }
  CHECK(r.looks == 0);
}
