#include "tests/support/catch.hpp"

#include "runtime/collectives/agreement.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/torch/two_ranks.hpp"

#include <atomic>
#include <functional>
#include <mutex>
#include <stdexcept>
#include <vector>

// What is decided on one rank and told (R33).

using namespace smp;
using namespace smp::test;

namespace {

using deciding = std::function<uint64_t()>;

/// Checks why each of three ranks does not agree.
void check_refusals(const deciding& decide, const failure& expected) {
  std::vector<failure> result(3);
  std::mutex mutex;
  run_virtual_world(3, manual_world(3), [&](session& s) {
    auto why = failure_of([&] { agree(s.internals(), "test", decide); });
    std::lock_guard guard{mutex};
    result[s.rank()] = why;
  });
  for (auto& why : result)
    CHECK(why == expected);
}

/// Checks what three ranks hear of `f`, which the second one runs.
void check_together(const std::function<void()>& f, const failure& expected) {
  std::vector<failure> result(3);
  std::atomic<int> done = 0;
  std::mutex mutex;
  run_virtual_world(3, manual_world(3), [&](session& s) {
    auto& rank = s.internals();
    auto why = failure_of([&] {
      do_together(rank, "test", [&] {
        if (s.rank() == 1)
          f();
        ++done;
      });
    });
    do_together(rank, "test", [&] { ++done; }); // all go on
    std::lock_guard guard{mutex};
    result[s.rank()] = why;
  });
  CHECK(done.load() == 2 + 3);
  for (auto& why : result)
    CHECK(why == expected);
}

} // namespace

TEST_CASE("each pipeline decides on its first rank, or the run on rank 0",
          "[runtime][R33]") {
  auto world = manual_world(2);
  world.config.ddp = true;
  std::atomic<int> asked = 0;
  std::vector<uint64_t> first(4), of_pipeline(4), of_run(4);
  std::mutex mutex;
  run_virtual_world(4, world, [&](session& s) {
    auto& rank = s.internals();
    auto mine = [&] {
      ++asked;
      return s.rank();
    };
    auto pipeline = agree(rank, "test", mine);
    auto run = agree_everywhere(rank, "test", mine);
    std::lock_guard guard{mutex};
    first[s.rank()] = s.rank() - s.rank() % 2;
    of_pipeline[s.rank()] = pipeline;
    of_run[s.rank()] = run;
  });
  CHECK(asked.load() == 3);
  CHECK(of_pipeline == first);
  CHECK(of_run == std::vector<uint64_t>(4, 0));
}

TEST_CASE("what one rank throws that decides, all throw", "[runtime][R33]") {
  failure x{error_code::config, rank_id{0}, "there", "no"};
  check_refusals([&]() -> uint64_t { throw error{x}; }, x);
  check_refusals([]() -> uint64_t { throw std::runtime_error{"no"}; },
                 {error_code::user_code, no_rank, {}, "no"});
  check_refusals([]() -> uint64_t { throw 7; },
                 {error_code::user_code,
                  no_rank,
                  {},
                  "an exception that does not derive from std::exception"});
}

TEST_CASE("what one rank throws while all do something, all throw",
          "[runtime][R33]") {
  failure x{error_code::config, rank_id{0}, "there", "no"};
  check_together([&] { throw error{x}; }, x);
  check_together([] { throw std::runtime_error{"no"}; },
                 {error_code::user_code, rank_id{1}, {}, "no"});
  check_together([] { throw 7; },
                 {error_code::user_code,
                  rank_id{1},
                  {},
                  "an exception that does not derive from std::exception"});
}
