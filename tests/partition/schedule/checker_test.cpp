#include "tests/support/catch.hpp"

#include "partition/schedule/checker.hpp"
#include "partition/schedule/promised_order.hpp"
#include "tests/support/cpu_time.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/gpt_tree.hpp"
#include "tests/support/partition_models.hpp"

#include "transport/error.hpp"

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <set>

using namespace smp;
using namespace smp::test;

namespace {

using counts = std::vector<uint64_t>;

/// Equal stages in a row; what a pipeline is in textbooks.
pipeline_program stages(uint32_t n, double forward = 1, double backward = 2) {
  pipeline_program result;
  result.devices = n;
  for (uint32_t i = 0; i < n; ++i)
    result.chain.push_back({i, forward, backward, 1, false});
  return result;
}

/// The same, `chunks` times over, with as much work as without chunks.
pipeline_program chunked_stages(uint32_t n, uint32_t chunks) {
  pipeline_program result;
  result.devices = n;
  result.chunks = chunks;
  for (uint32_t chunk = 0; chunk < chunks; ++chunk)
    for (uint32_t i = 0; i < n; ++i)
      result.chain.push_back({i, 1.0 / chunks, 2.0 / chunks, 1, false, chunk});
  return result;
}

schedule_report played(const pipeline_program& program, const std::string& name,
                       uint64_t microbatches, uint64_t active = 0) {
  if (active == 0)
    active = default_active_microbatches(name, microbatches, program.devices);
  auto policy = make_schedule(name, microbatches, active);
  check_options options;
  options.microbatches = microbatches;
  options.active = active;
  options.timeline = true;
  for (uint32_t i = 0; i < program.devices; ++i)
    options.orders.push_back(
      make_service_order(name, place_of(program, i, microbatches)));
  return check_schedule(program, *policy, options);
}

/// A schedule that does what a test says.
class scripted_schedule : public schedule {
public:
  explicit scripted_schedule(std::vector<task> tasks)
    : tasks_(std::move(tasks)) {
    // nop
  }

  std::optional<task> next() override {
    if (at_ == tasks_.size() || (at_ >= 1 && !done_))
      return std::nullopt;
    return tasks_[at_++];
  }

  void forward_done(microbatch_id) override {
    done_ = true;
  }

  void ended(microbatch_id) override {
    // nop
  }

private:
  std::vector<task> tasks_;
  size_t at_ = 0;
  bool done_ = false;
};

std::string refused(std::vector<task> tasks, uint64_t microbatches,
                    uint64_t active = 100) {
  scripted_schedule policy{std::move(tasks)};
  check_options options;
  options.microbatches = microbatches;
  options.active = active;
  return cause_of([&] { check_schedule(stages(2), policy, options); },
                  error_code::config);
}

task forward(uint64_t x) {
  return {microbatch_id{x}, phase::forward};
}

task backward(uint64_t x) {
  return {microbatch_id{x}, phase::backward};
}

} // namespace

// -- textbook figures ---------------------------------------------------------

TEST_CASE("simple and 1f1b have the bubble of the textbook on equal stages",
          "[partition][checker]") {
  for (uint32_t p : {1, 2, 4, 8})
    for (uint64_t m : {1, 2, 3, 8, 32})
      for (std::string name : {"simple", "1f1b"}) {
        INFO(name << ", " << p << " stages, " << m << " microbatches");
        auto x = played(stages(p), name, m, std::max<uint64_t>(m, p));
        auto slots = static_cast<double>(m + p - 1);
        CHECK(x.makespan == Catch::Approx(3 * slots));
        CHECK(x.bubble == Catch::Approx((p - 1) / slots).margin(1e-12));
      }
}

TEST_CASE("1f1b keeps the activations of active microbatches, simple of all",
          "[partition][checker]") {
  auto x = played(stages(4), "1f1b", 16, 4);
  CHECK(x.makespan == Catch::Approx(3 * 19));
  CHECK(*std::max_element(x.peak_live.begin(), x.peak_live.end()) == 4);
  CHECK(x.peak_live.back() == 1);
  CHECK(x.peak_activations.front() == 4);
  x = played(stages(4), "simple", 16);
  CHECK(x.peak_live == counts(4, 16));
  CHECK(x.peak_activations == std::vector<double>(4, 16));
}

TEST_CASE("interleaved 1F1B has the bubble of its formula",
          "[partition][checker]") {
  for (uint32_t p : {2, 4, 8})
    for (uint32_t v : {2, 4})
      for (uint64_t m : {p, 2 * p, 4 * p}) {
        INFO(p << " stages, " << v << " chunks, " << m << " microbatches");
        auto x = played(chunked_stages(p, v), "interleaved_1f1b", m);
        auto slots = static_cast<double>(v * m + p - 1);
        CHECK(x.makespan == Catch::Approx(3 * slots / v));
        CHECK(x.bubble == Catch::Approx((p - 1) / slots));
        // No more than the fixed sequence keeps, and one that waits.
        CHECK(x.peak_active <= 2 * p + 2);
      }
}

TEST_CASE("interleaved 1F1B takes any number of microbatches",
          "[partition][checker]") {
  for (uint32_t p : {2, 4})
    for (uint64_t m = 1; m <= 3 * p; ++m) {
      INFO(p << " stages, " << m << " microbatches");
      auto x = played(chunked_stages(p, 2), "interleaved_1f1b", m);
      // Never worse than the same stages in one piece.
      CHECK(x.makespan < played(stages(p), "1f1b", m).makespan + 1e-9);
      CHECK(x.timeline.size() == 2 * m * 2 * p);
    }
}

TEST_CASE("fewer microbatches than stages are fine", "[partition][checker]") {
  for (std::string name : {"simple", "interleaved", "1f1b"}) {
    auto x = played(stages(8), name, 3);
    CHECK(x.peak_active == 3);
    CHECK(x.makespan == Catch::Approx(3 * (3 + 8 - 1)));
  }
}

TEST_CASE("active microbatches bound what is alive, and cost time if too few",
          "[partition][checker][R2]") {
  auto x = played(stages(4), "interleaved", 16, 2);
  CHECK(x.peak_active == 2);
  CHECK(x.makespan > played(stages(4), "interleaved", 16, 4).makespan);
  // One at a time is not a pipeline at all.
  CHECK(played(stages(4), "interleaved", 5, 1).makespan
        == Catch::Approx(5 * 12));
}

TEST_CASE("hops delay but do not occupy", "[partition][checker]") {
  auto program = stages(2);
  program.hop_seconds = 0.25;
  auto x = played(program, "simple", 1);
  CHECK(x.makespan == Catch::Approx(6.5));
  CHECK(x.busy == std::vector<double>{3, 3});
}

TEST_CASE("a seed decides which of two comes first at about the same time",
          "[partition][checker]") {
  // The code on device 0 looks at each result before it goes on.
  auto program = stages(4);
  for (uint32_t i : {3, 2, 1})
    program.chain.insert(program.chain.begin() + i,
                         work{.device = 0, .waits = true});
  program = promised_program(program);
  program.hop_seconds = 1e-3;
  auto play = [&](uint64_t seed) {
    auto policy = make_schedule("1f1b", 8, 4);
    check_options options;
    options.microbatches = 8;
    options.seed = seed;
    for (uint32_t i = 0; i < 4; ++i)
      options.orders.push_back(
        make_promised_order("1f1b", promised_place_of(program, i, 8)));
    return check_schedule(program, *policy, options);
  };
  std::set<double> bubbles; // %
  for (uint64_t seed = 1; seed <= 25; ++seed) {
    auto x = play(seed);
    CHECK(x.makespan == play(seed).makespan);
    CHECK(x.busy == std::vector<double>(4, 24));
    bubbles.insert(std::round(100 * x.bubble));
  }
  // A race that is lost costs a segment or more.
  CHECK(*bubbles.rbegin() >= *bubbles.begin() + 3);
}

// -- invariants ---------------------------------------------------------------

TEST_CASE("any schedule runs every work once, in order, one at a time",
          "[partition][checker]") {
  std::mt19937_64 engine{9};
  for (int round = 0; round < 150; ++round) {
    auto devices = static_cast<uint32_t>(1 + engine() % 5);
    pipeline_program program;
    program.devices = devices;
    program.hop_seconds = static_cast<double>(engine() % 3);
    uint32_t last = devices;
    for (uint64_t i = 0, n = 1 + engine() % 8; i < n; ++i) {
      auto device = i == 0 ? 0 : static_cast<uint32_t>(engine() % devices);
      if (device == last)
        continue;
      last = device;
      program.chain.push_back({device, 1.0 + static_cast<double>(engine() % 4),
                               1.0 + static_cast<double>(engine() % 4), 1,
                               engine() % 4 == 0});
    }
    auto m = 1 + engine() % 7;
    for (std::string name :
         {"simple", "interleaved", "1f1b", "interleaved_1f1b"}) {
      auto active = name == "simple" ? m : 1 + engine() % (m + 1);
      auto x = played(program, name, m, active);
      REQUIRE(x.timeline.size() == 2 * m * program.chain.size());
      std::map<std::pair<task, size_t>, int> seen;
      std::vector<double> free(devices);
      std::map<microbatch_id, double> end;
      for (auto& y : x.timeline) {
        REQUIRE(y.begin >= free[y.device]); // one token per device
        free[y.device] = y.end;
        REQUIRE(y.begin >= end[y.what.microbatch]); // in one place at a time
        end[y.what.microbatch] = y.end;
      }
      REQUIRE(*std::max_element(free.begin(), free.end()) == x.makespan);
      REQUIRE(x.peak_active <= active);
      REQUIRE(x.bubble >= 0);
      REQUIRE(x.bubble < 1);
    }
  }
}

TEST_CASE("microbatches enter a stateful work in the order of their start",
          "[partition][checker][R19]") {
  // Microbatch 1 starts first by the list.
  pipeline_program program;
  program.devices = 2;
  program.chain = {{0, 1, 1, 1, false}, {1, 1, 1, 1, false}};
  auto entered = [&](service_order order) {
    list_schedule policy{3,
                         {forward(0), forward(1), forward(2), backward(0),
                          backward(1), backward(2)}};
    check_options options;
    options.microbatches = 3;
    options.orders.assign(2, order);
    options.timeline = true;
    counts result;
    for (auto& x : check_schedule(program, policy, options).timeline)
      if (x.device == 1 && x.what.what == phase::forward)
        result.push_back(x.what.microbatch.value);
    return result;
  };
  // A service order that prefers young microbatches ...
  service_order youngest = [](const ready_key& x, const ready_key& y) {
    return x.microbatch > y.microbatch;
  };
  CHECK(entered(youngest) == counts{2, 1, 0});
  // ... must not let them overtake where state changes.
  program.chain[1].ordered = true;
  CHECK(entered(youngest) == counts{0, 1, 2});
}

// -- what is refused ----------------------------------------------------------

TEST_CASE("a schedule that starts a phase twice is refused",
          "[partition][checker]") {
  CHECK(refused({forward(0), forward(0)}, 2)
        == "the schedule is refused: it starts [0, \"forward\"] twice");
  CHECK(refused({forward(0), backward(0), backward(0)}, 1)
        == "the schedule is refused: it starts [0, \"backward\"] twice");
}

TEST_CASE("a schedule that turns around too early is refused",
          "[partition][checker]") {
  CHECK(refused({forward(0), forward(1), backward(1)}, 2)
        == "the schedule is refused: it starts [1, \"backward\"] before the "
           "forward phase is done");
}

TEST_CASE("a schedule that waits for nothing is refused",
          "[partition][checker]") {
  CHECK(refused({}, 1)
        == "the schedule is refused: it never starts [0, \"forward\"] although "
           "nothing is in flight");
  CHECK(refused({forward(0), backward(0)}, 2)
        == "the schedule is refused: it never starts [1, \"forward\"] although "
           "nothing is in flight");
  CHECK(refused({forward(0)}, 1)
        == "the schedule is refused: it never starts [0, \"backward\"] "
           "although nothing is in flight");
}

TEST_CASE("a schedule that invents a microbatch is refused",
          "[partition][checker]") {
  CHECK(refused({forward(4)}, 2)
        == "the schedule is refused: it starts [4, \"forward\"] in a step of 2 "
           "microbatches");
}

TEST_CASE("a schedule that keeps too many microbatches alive is refused",
          "[partition][checker][R2]") {
  CHECK(refused({forward(0), forward(1)}, 2, 1)
        == "the schedule is refused: with [1, \"forward\"] it keeps 2 "
           "microbatches alive, smp.active_microbatches = 1");
}

TEST_CASE("simple with too few active microbatches would wait for ever",
          "[partition][checker][R2]") {
  // What `make_schedule` forbids: interleaved admission of simple's order.
  class stuck_schedule : public interleaved_schedule {
  public:
    using interleaved_schedule::interleaved_schedule;
    std::optional<task> next() override {
      auto x = interleaved_schedule::next();
      return x && x->what == phase::forward ? x : std::nullopt;
    }
  };
  stuck_schedule policy{4, 2};
  check_options options;
  options.microbatches = 4;
  CHECK_THROWS_AS(check_schedule(stages(2), policy, options), error);
}

// -- from a model -------------------------------------------------------------

TEST_CASE("a model becomes a chain of works that returns to its caller",
          "[partition][checker]") {
  // root(0) calls a(1) and then blocks(0), a Sequential with devices 1 1 0 1.
  auto model = make_model({{"", {1, 2}, 0, 1},
                           {"a", {}, 0, 2},
                           {"blocks", {3, 4, 5, 6}, 0, 0},
                           {"blocks.0", {}, 0, 3},
                           {"blocks.1", {}, 0, 3},
                           {"blocks.2", {}, 0, 3},
                           {"blocks.3", {}, 0, 3}});
  for (size_t i : {1, 3, 4, 6})
    model[i].pinned_device = 1;
  partition_options options;
  options.manual.devices = 2;
  options.manual.automatic = false;
  program_times times;
  times.step_seconds = 45;
  times.hop_seconds = 0.5;
  auto chain_of = [&] {
    auto program = make_program(model, make_partition(model, options), times);
    CHECK(program.devices == 2);
    CHECK(program.hop_seconds == 0.5);
    std::vector<std::pair<uint32_t, double>> result;
    for (auto& x : program.chain) {
      CHECK(x.backward == Catch::Approx(2 * x.forward));
      result.emplace_back(x.device, std::round(x.forward * 1e6) / 1e6);
    }
    return result;
  };
  using chain = std::vector<std::pair<uint32_t, double>>;
  model[2].container = true;
  SECTION("a run of a Sequential is one request") {
    model[2].sequential = true;
    CHECK(chain_of()
          == chain{{0, 1}, {1, 2}, {0, 0}, {1, 6}, {0, 3}, {1, 3}, {0, 0}});
  }
  SECTION("calls by a list's parent are single") {
    CHECK(chain_of()
          == chain{{0, 1},
                   {1, 2},
                   {0, 0},
                   {1, 3},
                   {0, 0},
                   {1, 3},
                   {0, 3},
                   {1, 3},
                   {0, 0}});
  }
}

TEST_CASE("works keep activations and know state",
          "[partition][checker][R19]") {
  auto model = make_model({{"", {1}, 5, 1}, {"a", {}, 7, 1}});
  model[1].pinned_device = 1;
  model[1].ordered = "buffer running_mean";
  partition_options options;
  options.manual.devices = 2;
  options.manual.automatic = false;
  auto program = make_program(model, make_partition(model, options), {});
  REQUIRE(program.chain.size() == 3);
  CHECK(program.chain[0].activations == 5);
  CHECK(program.chain[1].activations == 7);
  CHECK(program.chain[1].ordered);
  CHECK_FALSE(program.chain[0].ordered);
  auto report = played(program, "interleaved", 4, 3);
  CHECK(report.peak_live == counts{3, 2});
  CHECK(report.peak_activations == std::vector<double>{15, 14});
}

TEST_CASE("works that wait for what a call returned are those of its caller",
          "[partition][checker]") {
  // root(0) calls a(1), which calls c(1 or 2), and then b(1 or 2).
  auto model = make_model(
    {{"", {1, 2}, 0, 1}, {"a", {3}, 0, 1}, {"b", {}, 0, 1}, {"c", {}, 0, 1}});
  model[1].pinned_device = 1;
  auto waits = [&](uint32_t b, uint32_t c) {
    model[2].pinned_device = b;
    model[3].pinned_device = c;
    partition_options options;
    options.manual.devices = 3;
    options.manual.automatic = false;
    std::string result;
    for (auto& x :
         make_program(model, make_partition(model, options), {}).chain)
      result += std::to_string(x.device) + (x.waits ? "! " : " ");
    return result;
  };
  CHECK(waits(2, 2) == "0 1 2 1 0 2 0 ");
  SECTION("that computes with it") {
    model[1].waited_for = true;
    CHECK(waits(2, 2) == "0 1 2 1 0! 2 0 ");
  }
  SECTION("that adds it to a result of another device") {
    model[2].added_to = {module_id{1}};
    CHECK(waits(2, 1) == "0 1 0 2 0! ");
    CHECK(waits(1, 1) == "0 1 0 1 0 ");
  }
  SECTION("that returns it to another device") {
    model[3].passed_on = true;
    model[1].passed_on = true; // by the step, which nobody called
    CHECK(waits(2, 2) == "0 1 2 1! 0 2 0 ");
    CHECK(waits(2, 1) == "0 1 0 2 0 ");
  }
  SECTION("that changes state, there or below") {
    model[3].keeps_state = true;
    CHECK(waits(2, 2) == "0 1 2 1! 0! 2 0 ");
    CHECK(waits(2, 1) == "0 1 0! 2 0 ");
  }
}

TEST_CASE("a GPT on four devices is predicted as a pipeline",
          "[partition][checker]") {
  gpt_tree gpt{8, 192, false};
  partition_options options;
  options.manual.devices = 4;
  auto plan = make_partition(gpt.model, options);
  auto program = make_program(gpt.model, plan, {});
  double sum = 0;
  for (auto& x : program.chain)
    sum += x.forward + x.backward;
  CHECK(sum == Catch::Approx(1));
  auto report = played(program, "interleaved", 16);
  CHECK(report.makespan > 16 * plan.score.max_load * 0.9);
  CHECK(report.makespan < 16);
  CHECK(report.bubble < 0.5);
}

// -- size ---------------------------------------------------------------------

TEST_CASE("1,024 devices are simulated in time", "[partition][checker]") {
  constexpr uint32_t p = 1024;
  constexpr uint64_t m = slow_build > 1 ? 64 : 1024;
  // Every stage returns to device 0, as a Sequential there would have it.
  pipeline_program program;
  program.devices = p;
  program.hop_seconds = 1e-3;
  for (uint32_t i = 0; i < p; ++i) {
    if (i > 1)
      program.chain.push_back({0, 0, 0, 0, false});
    program.chain.push_back({i, 1, 2, 1, false});
  }
  auto begin = cpu_seconds();
  auto policy = make_schedule("interleaved", m, p + 2);
  check_options options;
  options.microbatches = m;
  auto x = check_schedule(program, *policy, options);
  CHECK(cpu_seconds() - begin < 10);
  CHECK(x.peak_active == m);
  CHECK(x.makespan > 3 * m);
}
