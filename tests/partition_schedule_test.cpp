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

// -- by name ------------------------------------------------------------------

TEST_CASE("an unknown schedule is an error that names the allowed ones",
          "[partition][schedule]") {
  auto text = message_of([] { make_schedule("gpipe", 4, 4); });
  CHECK(text.find("smp.pipeline") != std::string::npos);
  CHECK(text.find("\"gpipe\"") != std::string::npos);
  CHECK(text.find("\"simple\"") != std::string::npos);
  CHECK(text.find("\"interleaved\"") != std::string::npos);
}

TEST_CASE("simple with too few active microbatches is an error naming both keys",
          "[partition][schedule][R2]") {
  auto text = message_of([] { make_schedule("simple", 8, 3); });
  CHECK(text.find("smp.active_microbatches = 3") != std::string::npos);
  CHECK(text.find("smp.microbatches = 8") != std::string::npos);
  CHECK_NOTHROW(make_schedule("simple", 8, 8));
  CHECK_NOTHROW(make_schedule("interleaved", 8, 3));
}

TEST_CASE("the default of active microbatches suits every schedule",
          "[partition][schedule][R2]") {
  CHECK(default_active_microbatches("simple", 8, 2) == 8);
  CHECK(default_active_microbatches("interleaved", 8, 2) == 4);
  for (auto name : {"simple", "interleaved"})
    CHECK_NOTHROW(
      make_schedule(name, 8, default_active_microbatches(name, 8, 2)));
}

TEST_CASE("no microbatch and no active microbatch are errors",
          "[partition][schedule]") {
  CHECK(message_of([] { make_schedule("simple", 0, 1); })
          .find("smp.microbatches")
        != std::string::npos);
  CHECK(message_of([] { make_schedule("interleaved", 1, 0); })
          .find("smp.active_microbatches")
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
