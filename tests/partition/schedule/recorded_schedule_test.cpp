#include "tests/support/catch.hpp"

#include "partition/schedule/recorded_schedule.hpp"

using namespace smp;

namespace {

task f(uint64_t x) {
  return {microbatch_id{x}, phase::forward};
}

task b(uint64_t x) {
  return {microbatch_id{x}, phase::backward};
}

std::vector<task> take(schedule& x) {
  std::vector<task> result;
  while (auto y = x.next())
    result.push_back(*y);
  return result;
}

using tasks = std::vector<task>;

} // namespace

TEST_CASE("a recorded schedule repeats what it was given",
          "[partition][schedule][R33]") {
  recorded_schedule x{3, {f(1), f(0), b(0), f(2), b(1), b(2)}};
  CHECK(take(x) == tasks{f(1), f(0)});
  x.forward_done(microbatch_id{1});
  CHECK(take(x).empty()); // 0 turns around first, as it did
  x.forward_done(microbatch_id{0});
  CHECK(take(x) == tasks{b(0), f(2), b(1)});
  x.ended(microbatch_id{0});
  x.forward_done(microbatch_id{2});
  CHECK(take(x) == tasks{b(2)});
}

TEST_CASE("a recorded schedule goes past a microbatch that ended early",
          "[partition][schedule][R33]") {
  recorded_schedule x{2, {f(0), b(0), f(1), b(1)}};
  CHECK(take(x) == tasks{f(0)});
  x.ended(microbatch_id{0});
  CHECK(take(x) == tasks{f(1)});
}

TEST_CASE("a schedule that diverges from its record runs all microbatches",
          "[partition][schedule][R33]") {
  recorded_schedule x{4, {f(1), f(0), b(0), b(1), f(2), f(3), b(3), b(2)}};
  CHECK(take(x) == tasks{f(1), f(0)});
  x.diverge();
  CHECK(take(x).empty()); // never more than 2 at once
  x.forward_done(microbatch_id{1});
  CHECK(take(x) == tasks{b(1)});
  x.ended(microbatch_id{1});
  CHECK(take(x) == tasks{f(2)});
  x.ended(microbatch_id{0});
  x.ended(microbatch_id{2});
  CHECK(take(x) == tasks{f(3)});
}
