#include "tests/support/catch.hpp"

#include "actors/stalls/stall_monitor.hpp"
#include "tests/support/actors/actor_fixture.hpp"

#include <caf/typed_response_promise.hpp>

#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <vector>

using namespace smp;
using namespace std::chrono_literals;
using Catch::Matchers::ContainsSubstring;

namespace {

/// A rank that is stopped: it gets all and answers nothing.
rank_watch_actor::behavior_type
stopped(rank_watch_actor::stateful_pointer<rank_watch_state> self) {
  return {
    [self](look_atom) -> caf::result<uint64_t> {
      return self->make_response_promise<uint64_t>();
    },
    [](stall_atom, const std::string&) {},
    [](stall_atom, const failure&) {},
    [](stall_atom, const step_failed&) {},
    [self](status_atom) -> caf::result<rank_view> {
      return self->make_response_promise<rank_view>();
    },
    [](inspect_atom) { return rank_status{}; },
    [](const flight_query&) { return std::string{}; },
  };
}

/// Two ranks that wait for each other, and their monitor, in simulated time.
struct monitor_fixture : actor_fixture {
  void init(stall_options options, bool one_is_stopped = false) {
    for (uint64_t i = 0; i < 2; ++i) {
      auto& view = views.emplace_back();
      view.rank = rank_id{i};
      view.complete = view.settled = true;
      view.progress = 1;
      activity x;
      x.waits_for = "exchange \"" + std::to_string(i) + '"';
      x.from = rank_id{1 - i};
      view.activities = {x};
      watched_rank rank;
      rank.look = [this, i] { return ++looks, views[i].progress; };
      rank.view = [this, i] { return views[i]; };
      rank.report = [this](const std::string& text) { told.push_back(text); };
      rank.end = [this](const failure& x) { ends.push_back(x); };
      rank.fail_step = [this](step_id step, const failure& x) {
        failed.emplace_back(step, x);
      };
      config.ranks.push_back(own(i == 1 && one_is_stopped
                                   ? sys.spawn(stopped)
                                   : sys.spawn(rank_watch, rank)));
    }
    config.options = options;
    config.on_report = [this](const stall_report& x) { reports.push_back(x); };
    monitor = own(sys.spawn(stall_monitor, config));
    sched.run();
  }

  void pass(std::chrono::milliseconds time) {
    for (; time > 0ms; time -= 20ms) {
      sched.advance_time(20ms);
      sched.run();
    }
  }

  std::vector<rank_view> views;
  stall_monitor_config config;
  stall_monitor_actor monitor;
  std::vector<std::string> told;
  std::vector<failure> ends;
  std::vector<std::pair<step_id, failure>> failed;
  std::vector<stall_report> reports;
  int looks = 0;
};

} // namespace

TEST_CASE_METHOD(monitor_fixture, "the monitor ends a deadlock once, at once",
                 "[actors][stalls]") {
  init({});
  pass(1s);
  REQUIRE(reports.size() == 1);
  CHECK(reports[0].deadlock);
  REQUIRE(ends.size() == 2);
  CHECK(ends[0].code == error_code::stalled);
  CHECK(ends[0].text == reports[0].text);
  CHECK(told.empty()); // the end says it
  pass(10min);
  CHECK(reports.size() == 1);
  auto status = ask<stall_status>(monitor, status_atom_v);
  CHECK(status.reports == 1);
  CHECK(status.text == reports[0].text);
}

TEST_CASE_METHOD(monitor_fixture, "a rank is told which of its steps fails",
                 "[actors][stalls][R31]") {
  init({});
  for (uint64_t i = 0; i < 2; ++i) {
    auto& view = views[i];
    view.step = step_id{7 + i};
    view.sharers = {rank_id{0}, rank_id{1}};
    view.shared = {
      {"m", microbatch_id{0}, phase::forward, 1 + i, true, {"m/a1.0"}}};
    view.activities[0].who = activity::kind::context;
    view.activities[0].subject = {.what = wait_subject::kind::collective,
                                  .name = "m/a1.0",
                                  .group = view.sharers};
  }
  pass(1s);
  REQUIRE(reports.size() == 1);
  REQUIRE(failed.size() == 2);
  CHECK(failed[0].first == step_id{7});
  CHECK(failed[1].first == step_id{8});
  CHECK(failed[0].second == reports[0].step_fails);
  CHECK(ends.empty());
  CHECK(told.empty());
}

TEST_CASE_METHOD(monitor_fixture, "a stopped rank is named after the timeout",
                 "[actors][stalls]") {
  init({3, false}, true);
  pass(2900ms);
  CHECK(reports.empty());
  pass(2s);
  REQUIRE(reports.size() == 1);
  CHECK(reports[0].silent == std::vector<rank_id>{rank_id{1}});
  CHECK_THAT(reports[0].text, ContainsSubstring("rank 1 has not answered for"));
  CHECK(told.size() == 1);
  CHECK(ends.empty());
  pass(3s); // after the first doubling
  CHECK(reports.size() == 2);
}

TEST_CASE_METHOD(monitor_fixture, "a stall stands until something moves",
                 "[actors][stalls]") {
  for (auto reported : {false, true}) {
    if (!reported)
      init({3, false});
    // Rank 0 computes, so that it is not a deadlock.
    views[0].settled = false;
    pass(reported ? 4s : 1s);
    auto x = ask<stall_status>(monitor, status_atom_v);
    CHECK(x.standing == reported);
    CHECK(x.quiet_seconds > (reported ? 4.0 : 0.5));
  }
  ++views[0].progress;
  pass(1s);
  auto x = ask<stall_status>(monitor, status_atom_v);
  CHECK_FALSE(x.standing);
  CHECK(x.reports == 1);
  CHECK(x.quiet_seconds < 2);
}

TEST_CASE_METHOD(monitor_fixture, "a rank that goes on is asked for a number",
                 "[actors][stalls]") {
  init({3, true});
  for (int i = 0; i < 100; ++i) {
    ++views[i % 2].progress;
    pass(200ms);
  }
  CHECK(reports.empty());
  CHECK(looks <= 2 * 101); // not more than five times a second each
}
