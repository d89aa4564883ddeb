#include "tests/support/catch.hpp"

#include "partition/schedule/schedule.hpp"
#include "tests/support/error_of.hpp"

#include "transport/error.hpp"

#include <algorithm>
#include <string>
#include <vector>

using namespace smp;
using namespace smp::test;

namespace {

task forward(uint64_t x) {
  return {microbatch_id{x}, phase::forward};
}

task backward(uint64_t x) {
  return {microbatch_id{x}, phase::backward};
}

std::vector<task> drain(schedule& x) {
  std::vector<task> result;
  while (auto y = x.next())
    result.push_back(*y);
  return result;
}

std::string message_of(auto f) {
  return cause_of(f, error_code::config);
}

using tasks = std::vector<task>;

} // namespace

// -- simple -------------------------------------------------------------------

TEST_CASE("simple starts every forward phase before any backward phase",
          "[partition][schedule]") {
  simple_schedule uut{3};
  CHECK(drain(uut) == tasks{forward(0), forward(1), forward(2)});
  uut.forward_done(microbatch_id{1});
  uut.forward_done(microbatch_id{0});
  CHECK(drain(uut).empty());
  uut.forward_done(microbatch_id{2});
  CHECK(drain(uut) == tasks{backward(0), backward(1), backward(2)});
  for (uint64_t x : {2, 0, 1})
    uut.ended(microbatch_id{x});
  CHECK(drain(uut).empty());
}

TEST_CASE("simple turns around although one body ends without backward",
          "[partition][schedule][R4]") {
  simple_schedule uut{2};
  drain(uut);
  uut.forward_done(microbatch_id{0});
  uut.ended(microbatch_id{1});
  CHECK(drain(uut) == tasks{backward(0)});
}

// -- interleaved --------------------------------------------------------------

TEST_CASE("interleaved prefers a possible backward phase to a forward phase",
          "[partition][schedule]") {
  interleaved_schedule uut{4, 3};
  CHECK(drain(uut) == tasks{forward(0), forward(1), forward(2)});
  uut.forward_done(microbatch_id{0});
  CHECK(drain(uut) == tasks{backward(0)});
  uut.forward_done(microbatch_id{2});
  uut.forward_done(microbatch_id{1});
  CHECK(drain(uut) == tasks{backward(1), backward(2)});
  uut.ended(microbatch_id{0});
  CHECK(drain(uut) == tasks{forward(3)});
}

TEST_CASE("interleaved never has more than active microbatches alive",
          "[partition][schedule][R2]") {
  for (uint64_t active = 1; active <= 5; ++active) {
    interleaved_schedule uut{9, active};
    uint64_t alive = 0;
    uint64_t ended = 0;
    tasks running;
    do {
      for (auto x : drain(uut)) {
        alive += x.what == phase::forward;
        running.push_back(x);
      }
      REQUIRE(alive <= active);
      REQUIRE_FALSE(running.empty());
      auto x = running.front();
      running.erase(running.begin());
      if (x.what == phase::forward) {
        uut.forward_done(x.microbatch);
      } else {
        uut.ended(x.microbatch);
        --alive;
        ++ended;
      }
    } while (ended < 9);
    CHECK(drain(uut).empty());
  }
}

TEST_CASE("a body without backward makes room for the next microbatch",
          "[partition][schedule][R4]") {
  interleaved_schedule uut{2, 1};
  CHECK(drain(uut) == tasks{forward(0)});
  SECTION("ended in its forward phase") {
    uut.ended(microbatch_id{0});
  }
  SECTION("reported forward done and ended before the grant") {
    uut.forward_done(microbatch_id{0});
    uut.ended(microbatch_id{0});
  }
  CHECK(drain(uut) == tasks{forward(1)});
}

TEST_CASE("an event that cannot be is an internal error, not a wrong step",
          "[partition][schedule]") {
  interleaved_schedule uut{2, 2};
  CHECK_THROWS_AS(uut.ended(microbatch_id{0}), error);
  CHECK_THROWS_AS(uut.forward_done(microbatch_id{0}), error);
  CHECK_THROWS_AS(uut.forward_done(microbatch_id{2}), error);
  drain(uut);
  uut.forward_done(microbatch_id{0});
  CHECK_THROWS_AS(uut.forward_done(microbatch_id{0}), error);
  uut.ended(microbatch_id{0});
  CHECK_THROWS_AS(uut.ended(microbatch_id{0}), error);
}

// -- 1f1b ---------------------------------------------------------------------

TEST_CASE("1f1b starts active forwards, then one for each backward that ends",
          "[partition][schedule]") {
  one_f_one_b_schedule uut{4, 2};
  CHECK(drain(uut) == tasks{forward(0), forward(1)});
  uut.forward_done(microbatch_id{0});
  CHECK(drain(uut) == tasks{backward(0)});
  uut.ended(microbatch_id{0});
  CHECK(drain(uut) == tasks{forward(2)});
}

TEST_CASE("1f1b turns around in order whatever finishes first",
          "[partition][schedule]") {
  one_f_one_b_schedule uut{3, 3};
  drain(uut);
  uut.forward_done(microbatch_id{2});
  uut.forward_done(microbatch_id{1});
  CHECK(drain(uut).empty());
  uut.forward_done(microbatch_id{0});
  CHECK(drain(uut) == tasks{backward(0), backward(1), backward(2)});
}

TEST_CASE("1f1b does not wait for a body that ended without backward",
          "[partition][schedule][R4]") {
  one_f_one_b_schedule uut{3, 2};
  drain(uut);
  uut.forward_done(microbatch_id{1});
  uut.ended(microbatch_id{0});
  CHECK(drain(uut) == tasks{backward(1), forward(2)});
}

// -- list ---------------------------------------------------------------------

TEST_CASE("a list is followed task by task", "[partition][schedule]") {
  list_schedule uut{3,
                    {forward(0), forward(1), backward(1), forward(2),
                     backward(0), backward(2)}};
  CHECK(drain(uut) == tasks{forward(0), forward(1)});
  uut.forward_done(microbatch_id{0});
  CHECK(drain(uut).empty());
  uut.forward_done(microbatch_id{1});
  CHECK(drain(uut) == tasks{backward(1), forward(2), backward(0)});
  uut.forward_done(microbatch_id{2});
  CHECK(drain(uut) == tasks{backward(2)});
}

TEST_CASE("a list skips the backward of a body that ended without",
          "[partition][schedule][R4]") {
  list_schedule uut{2, {forward(0), backward(0), forward(1), backward(1)}};
  CHECK(drain(uut) == tasks{forward(0)});
  uut.ended(microbatch_id{0});
  CHECK(drain(uut) == tasks{forward(1)});
  uut.ended(microbatch_id{1});
  CHECK(drain(uut).empty());
}

TEST_CASE("a list that is not a schedule is an error naming the task",
          "[partition][schedule]") {
  auto message = [](tasks xs) {
    return message_of([&] { make_schedule("list", 2, 2, xs); });
  };
  CHECK(message({forward(0), forward(0)})
        == "smp.schedule.list[1] = [0, \"forward\"]: it stands there twice");
  CHECK(message({backward(0)})
        == "smp.schedule.list[0] = [0, \"backward\"]: its forward phase must "
           "come first");
  CHECK(message({forward(0), backward(0), backward(0)})
        == "smp.schedule.list[2] = [0, \"backward\"]: it stands there twice");
  CHECK(message({forward(0), forward(1), forward(2)})
        == "smp.schedule.list[2] = [2, \"forward\"]: smp.microbatches = 2");
  CHECK(message({forward(0), forward(1), backward(1)})
        == "smp.schedule.list lacks [0, \"backward\"]");
  CHECK(message({forward(0), backward(0)})
        == "smp.schedule.list lacks [1, \"forward\"]");
}

TEST_CASE("a list may start microbatches in any order",
          "[partition][schedule]") {
  list_schedule uut{2, {forward(1), forward(0), backward(0), backward(1)}};
  CHECK(drain(uut) == tasks{forward(1), forward(0)});
  uut.forward_done(microbatch_id{1});
  CHECK(drain(uut).empty());
  uut.forward_done(microbatch_id{0});
  CHECK(drain(uut) == tasks{backward(0), backward(1)});
}

// -- by name ------------------------------------------------------------------

TEST_CASE("an unknown schedule is an error that names the allowed ones",
          "[partition][schedule]") {
  auto text = message_of([] { make_schedule("gpipe", 4, 4); });
  CHECK(text.find("smp.pipeline") != std::string::npos);
  CHECK(text.find("\"gpipe\"") != std::string::npos);
  CHECK(text.find("\"simple\"") != std::string::npos);
  CHECK(text.find("\"interleaved\"") != std::string::npos);
  CHECK(text.find("\"1f1b\"") != std::string::npos);
}

TEST_CASE(
  "simple and list with too few active microbatches are an error "
  "naming both keys",
  "[partition][schedule][R2]") {
  CHECK(message_of([] {
          make_schedule("list", 8, 7);
        }).find("smp.active_microbatches = 7")
        == 0);
  auto text = message_of([] { make_schedule("simple", 8, 3); });
  CHECK(text.find("smp.active_microbatches = 3") != std::string::npos);
  CHECK(text.find("smp.microbatches = 8") != std::string::npos);
  CHECK_NOTHROW(make_schedule("simple", 8, 8));
  CHECK_NOTHROW(make_schedule("interleaved", 8, 3));
}

TEST_CASE("the default of active microbatches suits every schedule",
          "[partition][schedule][R2]") {
  CHECK(default_active_microbatches("simple", 8, 2) == 8);
  CHECK(default_active_microbatches("list", 8, 2) == 8);
  CHECK(default_active_microbatches("interleaved", 8, 2) == 5);
  CHECK(default_active_microbatches("1f1b", 8, 2) == 5);
  CHECK(default_active_microbatches("interleaved_1f1b", 8, 4) == 10);
  for (auto name : {"simple", "interleaved", "1f1b", "interleaved_1f1b"})
    CHECK_NOTHROW(
      make_schedule(name, 8, default_active_microbatches(name, 8, 2)));
}

TEST_CASE("a rank that waits for no other has one microbatch alive",
          "[partition][schedule][R2]") {
  for (auto name : {"interleaved", "1f1b", "interleaved_1f1b"})
    CHECK(default_active_microbatches(name, 8, 1, 1) == 1);
  for (auto name : {"simple", "list"})
    CHECK(default_active_microbatches(name, 8, 1, 1) == 8);
  CHECK(default_active_microbatches("interleaved", 8, 1, 2) == 4);
  CHECK(default_active_microbatches("actor", 8, 1, 1) == 4);
}

TEST_CASE("no microbatch and no active microbatch are errors",
          "[partition][schedule]") {
  CHECK(
    message_of([] { make_schedule("simple", 0, 1); }).find("smp.microbatches")
    != std::string::npos);
  CHECK(message_of([] {
          make_schedule("interleaved", 1, 0);
        }).find("smp.active_microbatches")
        != std::string::npos);
}

// -- service order ------------------------------------------------------------

TEST_CASE("backward first serves backward, then the oldest, then first come",
          "[partition][schedule][R32]") {
  std::vector<ready_key> xs{
    {phase::forward, microbatch_id{0}, 1},
    {phase::backward, microbatch_id{2}, 2},
    {phase::forward, microbatch_id{0}, 0},
    {phase::backward, microbatch_id{1}, 3},
  };
  auto arrivals = [&xs](service_order f) {
    std::sort(xs.begin(), xs.end(), f);
    std::vector<uint64_t> result;
    for (auto& x : xs)
      result.push_back(x.arrival);
    return result;
  };
  CHECK(arrivals(backward_first) == std::vector<uint64_t>{3, 2, 0, 1});
}

TEST_CASE("the order of interleaved 1F1B is Megatron's on every device",
          "[partition][schedule][R32]") {
  // Its sequence for p = 2, v = 2 and 4 microbatches, written out by hand:
  // warm-up of 2 (p - d - 1) + (v - 1) p forward segments, then one forward
  // and one backward in turn. "1.0" is microbatch 1 in chunk 0.
  auto sequence_of = [](uint32_t device) {
    service_place place{device, 2, 4, 2, {0, 1}};
    auto order = make_service_order("interleaved_1f1b", place);
    std::vector<ready_key> xs;
    for (uint64_t mb = 0; mb < 4; ++mb)
      for (uint64_t segment = 0; segment < 2; ++segment)
        for (auto what : {phase::forward, phase::backward})
          xs.push_back({what, microbatch_id{mb}, 0, segment});
    std::sort(xs.begin(), xs.end(), order);
    std::string result;
    for (auto& x : xs) {
      auto forward = x.what == phase::forward;
      result += result.empty() ? "" : " ";
      result += (forward ? "F" : "B") + std::to_string(x.microbatch.value) + "."
                + std::to_string(forward ? x.segment : 1 - x.segment);
    }
    return result;
  };
  CHECK(sequence_of(0)
        == "F0.0 F1.0 F0.1 F1.1 F2.0 B0.1 F3.0 B1.1 F2.1 B0.0 F3.1 B1.0 B2.1 "
           "B3.1 B2.0 B3.0");
  CHECK(sequence_of(1)
        == "F0.0 F1.0 F0.1 B0.1 F1.1 B1.1 F2.0 B0.0 F3.0 B1.0 F2.1 B2.1 F3.1 "
           "B3.1 B2.0 B3.0");
}

TEST_CASE("other schedules serve backward first", "[partition][schedule]") {
  ready_key old{phase::forward, microbatch_id{0}, 0, 0};
  ready_key back{phase::backward, microbatch_id{7}, 1, 0};
  for (auto name : {"simple", "interleaved", "1f1b", "list"})
    CHECK(make_service_order(name, {0, 2, 8, 1, {0}})(back, old));
  CHECK_FALSE(
    make_service_order("interleaved_1f1b", {0, 2, 8, 1, {0}})(back, old));
}

TEST_CASE("a list serves steps of other numbers of microbatches",
          "[partition][schedule]") {
  tasks two{forward(1), forward(0), backward(0), backward(1)};
  CHECK(fit_list(two, 2, 2) == two);
  CHECK(fit_list(two, 2, 1) == tasks{forward(0), backward(0)});
  CHECK(fit_list(two, 2, 3)
        == tasks{forward(1), forward(0), backward(0), backward(1), forward(2),
                 backward(2)});
  for (uint64_t n : {1, 2, 3, 8})
    CHECK_NOTHROW(make_schedule("list", n, n, fit_list(two, 2, n)));
}
