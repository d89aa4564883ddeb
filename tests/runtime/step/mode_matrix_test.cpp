// ctest: seconds=118 label=proof
#include "tests/support/catch.hpp"

#include "tests/support/runs/program.hpp"
#include "tests/support/torch/equality.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <optional>
#include <string>
#include <vector>

// Every schedule in every mode against one process that knows neither (R35 to
// R37), over the loopback fabric with messages that overtake each other. What
// is true of a mode is checked besides: a step that silently ran in another one
// would give the same numbers.

using namespace smp;
using namespace smp::test;

namespace {

// -- schedules ----------------------------------------------------------------

/// Odd microbatches first, then even ones.
std::vector<microbatch_id> unusual_order(uint64_t microbatches) {
  std::vector<microbatch_id> result;
  for (uint64_t parity : {1, 0})
    for (auto x = parity; x < microbatches; x += 2)
      result.push_back(microbatch_id{x});
  return result;
}

/// In that order, and the youngest turns around first, but the odd ones before
/// the even ones start.
std::vector<task> unusual_list(uint64_t microbatches) {
  std::vector<task> result;
  std::vector<task> backward;
  for (auto x : unusual_order(microbatches)) {
    if (x.value == 0) {
      result.insert(result.end(), backward.rbegin(), backward.rend());
      backward.clear();
    }
    result.push_back({x, phase::forward});
    backward.push_back({x, phase::backward});
  }
  result.insert(result.end(), backward.rbegin(), backward.rend());
  return result;
}

void set_schedule(session_config& x, const std::string& pipeline) {
  x.pipeline = pipeline;
  if (pipeline == "interleaved_1f1b")
    x.chunks = 2;
  if (pipeline == "list")
    x.schedule.list = unusual_list(x.microbatches);
  if (pipeline == "actor") {
    // A busy machine may let it wait for long.
    x.schedule.plugin = built_program("../lib/unusual_schedule.so");
    x.schedule.name = "unusual";
  }
}

// -- modes --------------------------------------------------------------------

struct mode {
  bool replays = false;
  std::optional<bool> fast = false; // as smp.fast_mode has it
  bool fixed_order = false;
};

/// What a user gets who sets nothing of `smp.fast_mode`.
constexpr std::optional<bool> as_by_default;

void set_mode(session_config& x, mode m) {
  x.static_mode = m.replays;
  if (m.replays && !m.fixed_order)
    x.static_steps = 2; // of 5
  x.fast_mode = m.fast;
  x.deterministic_server = m.fixed_order;
}

/// What the ranks counted in the last step.
struct counted {
  std::atomic<uint64_t> replayed = 0; // ranks
  std::atomic<uint64_t> requests = 0;
  std::atomic<uint64_t> waits = 0; // for answers
};

void check_mode(const counted& x, uint64_t pp, mode m) {
  INFO(fmt::format("{} ranks replayed, {} requests, {} waits",
                   x.replayed.load(), x.requests.load(), x.waits.load()));
  CHECK(x.replayed == (m.replays || m.fixed_order ? pp : 0));
  CHECK(x.requests > 0);
  // With two ranks the caller wants every result at once.
  if (m.fast == false)
    CHECK(x.waits >= x.requests);
  else if (pp > 2 && (m.fast || !m.fixed_order))
    // A fixed order by default has learnt in steps that waited.
    CHECK(x.waits < x.requests);
}

/// Trains with each schedule in this mode, and in one process.
void check(mode m) {
  auto pp = GENERATE(2u, 4u);
  auto pipeline = GENERATE(as<std::string>{}, "simple", "interleaved", "1f1b",
                           "interleaved_1f1b", "list", "actor");
  auto microbatches = GENERATE(1u, 3u, 8u);
  // By turns; of each schedule and mode, both on either number of ranks.
  auto dropout = (microbatches == 3) == (pp == 4) ? 0.2 : 0.0;
  DYNAMIC_SECTION(fmt::format("pp {} {} microbatches {} dropout {}", pp,
                              pipeline, microbatches, dropout)) {
    virtual_world_options world;
    world.config.pipeline_parallel_degree = pp;
    world.config.microbatches = microbatches;
    world.config.threads = 1;
    set_schedule(world.config, pipeline);
    set_mode(world.config, m);
    world.reorder = true;
    std::vector<step_numbers> steps;
    counted last;
    run_virtual_world(pp, world, [&](session& s) {
      auto mine = run_steps(s, microbatches, dropout);
      auto stats = s.last_step();
      last.replayed += stats.replayed;
      last.requests += stats.requests;
      last.waits += stats.waits;
      if (s.pp_rank() == 0)
        steps = std::move(mine);
    });
    check_mode(last, pp, m);
    CHECK(differences(steps, world.config.seed, microbatches, dropout)
          == std::vector<std::string>{});
  }
}

} // namespace

TEST_CASE("every schedule gives the numbers of one process where calls wait",
          "[runtime][equality][R32]") {
  check({});
}

TEST_CASE("every schedule gives the numbers of one process where calls go on",
          "[runtime][equality][fast][R32][R38]") {
  check({.fast = true});
}

TEST_CASE("every schedule is replayed with the numbers of one process",
          "[runtime][equality][static][R32][R33]") {
  check({.replays = true});
}

TEST_CASE(
  "every schedule is replayed with the numbers of one process where "
  "calls go on",
  "[runtime][equality][static][fast][R32][R33][R38]") {
  check({.replays = true, .fast = true});
}

TEST_CASE("every schedule gives the numbers of one process in a fixed order",
          "[runtime][equality][deterministic][R32][R33]") {
  check({.fixed_order = true});
}

TEST_CASE(
  "every schedule is replayed in a fixed order with the numbers of one "
  "process",
  "[runtime][equality][static][deterministic][R32][R33]") {
  check({.replays = true, .fixed_order = true});
}

TEST_CASE("every schedule gives the numbers of one process by default",
          "[runtime][equality][fast][auto][R32][R38]") {
  check({.fast = as_by_default});
}

TEST_CASE(
  "every schedule is replayed with the numbers of one process by "
  "default",
  "[runtime][equality][static][fast][auto][R32][R33][R38]") {
  check({.replays = true, .fast = as_by_default});
}

TEST_CASE(
  "every schedule gives the numbers of one process in a fixed order "
  "by default",
  "[runtime][equality][deterministic][fast][auto][R32][R33][R38]") {
  check({.fast = as_by_default, .fixed_order = true});
}

TEST_CASE(
  "every schedule is replayed in a fixed order with the numbers of one "
  "process by default",
  "[runtime][equality][static][deterministic][fast][auto][R32][R33][R38]") {
  check({.replays = true, .fast = as_by_default, .fixed_order = true});
}
