#include "tests/support/catch.hpp"

#include "partition/schedule.hpp"

#include "transport/error.hpp"

#include <algorithm>
#include <string>
#include <vector>

using namespace smp;

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
  try {
    f();
  } catch (const error& x) {
    CHECK(x.code() == error_code::config);
    return x.cause().text;
  }
  FAIL("nothing was thrown");
  return {};
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

TEST_CASE("a list that is no schedule is an error naming the task",
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
  CHECK(default_active_microbatches("interleaved", 8, 2) == 4);
  CHECK(default_active_microbatches("1f1b", 8, 2) == 4);
  for (auto name : {"simple", "interleaved", "1f1b"})
    CHECK_NOTHROW(
      make_schedule(name, 8, default_active_microbatches(name, 8, 2)));
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
  CHECK(arrivals(arrival_order) == std::vector<uint64_t>{0, 1, 2, 3});
}
