#include "tests/support/catch.hpp"

#include "actors/schedule/step_driver.hpp"

#include <map>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

using namespace smp;

namespace {

using lines = std::vector<std::string>;

struct driver_fixture : driver_output {
  void start(request x) override {
    requests[x.microbatch.value] = x.id;
    turn_of[x.microbatch.value] = x.start_number;
    note("f", x.microbatch);
  }

  void grant(response x) override {
    note("b", microbatch_id{x.id.number});
  }

  void forward_over(const smp::forward_over& x) override {
    turns.push_back(x.start_number);
  }

  void microbatch_over(const microbatch_done& x) override {
    note("over ", x.microbatch);
  }

  void failed(const step_failed& x) override {
    log.push_back("failed " + x.error.text);
  }

  void step_over(step_report x) override {
    report = std::move(x);
    log.push_back(report.error ? "end " + report.error.text : "end");
  }

  void note(const std::string& what, microbatch_id x) {
    log.push_back(what + std::to_string(x.value));
  }

  /// Microbatch `x` waits for its grant, under an id equal to its number.
  void forward_done(uint64_t x) {
    driver.forward_done({{rank_id{0}, x}, microbatch_id{x}});
  }

  void ended(uint64_t x, failure err = {}) {
    payload body;
    body.bytes.resize(x + 1);
    driver.ended({requests.at(x), std::move(body), std::move(err)});
  }

  void run(uint64_t microbatches) {
    driver.run({{step_id{1}, microbatches}, {}});
  }

  lines take() {
    return std::exchange(log, {});
  }

  lines log;
  std::vector<uint64_t> turns; // forward phases that are over
  std::map<uint64_t, request_id> requests;
  std::map<uint64_t, uint64_t> turn_of;
  step_report report;
  schedule_factory make = [](uint64_t n) {
    return make_schedule("interleaved", n, 2);
  };
  step_driver driver{rank_id{0}, [this](uint64_t n) { return make(n); }, *this};
};

/// Says the same task each time it is asked.
struct stubborn_schedule : schedule {
  explicit stubborn_schedule(task x) : what(x) {
    // nop
  }

  std::optional<task> next() override {
    return what;
  }

  void forward_done(microbatch_id) override {
    // nop
  }

  void ended(microbatch_id) override {
    // nop
  }

  task what;
};

struct throwing_schedule : stubborn_schedule {
  using stubborn_schedule::stubborn_schedule;

  void forward_done(microbatch_id) override {
    throw std::runtime_error("user's bug");
  }

  std::optional<task> next() override {
    return std::exchange(first, std::nullopt);
  }

  std::optional<task> first = task{microbatch_id{0}, phase::forward};
};

failure boom() {
  return {error_code::user_code, rank_id{1}, "m", "boom"};
}

} // namespace

TEST_CASE_METHOD(driver_fixture, "interleaved turns around at once",
                 "[actors][driver]") {
  run(3);
  CHECK(take() == lines{"f0", "f1"});
  forward_done(0);
  CHECK(take() == lines{"b0"});
  ended(0);
  CHECK(take() == lines{"over 0", "f2"});
  forward_done(2);
  forward_done(1);
  ended(1);
  CHECK(driver.num_running() == 1);
  CHECK(driver.num_left() == 1);
  ended(2);
  CHECK(take() == lines{"b2", "b1", "over 1", "over 2", "end"});
  REQUIRE(report.values.size() == 3);
  for (size_t i = 0; i < 3; ++i)
    CHECK(report.values[i].bytes.size() == i + 1); // each at its place
}

TEST_CASE_METHOD(driver_fixture,
                 "each forward phase ends once, under the turn of its start",
                 "[actors][driver][R19]") {
  make = [](uint64_t n) {
    using enum phase;
    return make_schedule("list", n, n,
                         {{microbatch_id{1}, forward},
                          {microbatch_id{0}, forward},
                          {microbatch_id{1}, backward},
                          {microbatch_id{0}, backward}});
  };
  run(2);
  CHECK(turn_of == std::map<uint64_t, uint64_t>{{0, 1}, {1, 0}});
  ended(0); // without a backward phase
  CHECK(turns == std::vector<uint64_t>{1});
  forward_done(1);
  ended(1);
  CHECK(turns == std::vector<uint64_t>{1, 0});
}

TEST_CASE_METHOD(driver_fixture, "simple runs all forward phases first",
                 "[actors][driver]") {
  make = [](uint64_t n) { return make_schedule("simple", n, n); };
  run(2);
  forward_done(1);
  CHECK(take() == lines{"f0", "f1"});
  forward_done(0);
  CHECK(take() == lines{"b0", "b1"});
}

TEST_CASE_METHOD(driver_fixture,
                 "microbatches without a backward phase just end",
                 "[actors][driver]") {
  run(3); // R4: evaluation
  ended(0);
  ended(1);
  ended(2);
  CHECK(take() == lines{"f0", "f1", "over 0", "f2", "over 1", "over 2", "end"});
  CHECK_FALSE(report.error);
}

TEST_CASE_METHOD(driver_fixture,
                 "after a failure nothing starts and what runs is waited for",
                 "[actors][driver]") {
  run(4);
  forward_done(0);
  take();
  driver.failed({step_id{1}, boom()});
  forward_done(1);
  CHECK(take().empty());
  ended(1, {error_code::cancelled, rank_id{0}, {}, "later"});
  CHECK(take() == lines{"over 1"});
  ended(0);
  CHECK(take() == lines{"over 0", "end boom"});
  CHECK(report.error == boom());
  CHECK(report.values.empty());
}

TEST_CASE_METHOD(driver_fixture, "a microbatch that fails ends the step",
                 "[actors][driver]") {
  run(3);
  take();
  ended(0, boom());
  CHECK(take() == lines{"over 0"});
  ended(1);
  CHECK(take() == lines{"over 1", "end boom"});
  run(1); // the next step is a new one
  CHECK(take() == lines{"f0"});
}

TEST_CASE_METHOD(driver_fixture, "old news do not reach the next step",
                 "[actors][driver]") {
  run(1);
  auto old = requests.at(0);
  ended(0);
  driver.run({{step_id{2}, 1}, {}});
  take();
  driver.failed({step_id{1}, boom()});
  driver.ended({old, {}, boom()});
  CHECK(take().empty());
}

TEST_CASE_METHOD(driver_fixture, "a schedule that would wait for ever is named",
                 "[actors][driver]") {
  // It knows of three microbatches, the step has four.
  make = [](uint64_t) { return std::make_unique<simple_schedule>(3); };
  driver.run({{step_id{1}, 4}, {}});
  forward_done(0);
  forward_done(1);
  forward_done(2);
  ended(0);
  ended(1);
  take();
  ended(2);
  CHECK(report.error.code == error_code::stalled);
  CHECK(take().front() == "over 2");
}

TEST_CASE_METHOD(driver_fixture, "a schedule that repeats itself is refused",
                 "[actors][driver]") {
  SECTION("forward") {
    make = [](uint64_t) {
      return std::make_unique<stubborn_schedule>(
        task{microbatch_id{0}, phase::forward});
    };
    run(2);
    auto text
      = "the schedule starts the forward phase of microbatch 0, which"
        " is not due";
    CHECK(take() == lines{"f0", std::string{"failed "} + text});
    ended(0);
    CHECK(report.error.text == text);
  }
  SECTION("backward") {
    make = [](uint64_t) {
      return std::make_unique<stubborn_schedule>(
        task{microbatch_id{0}, phase::backward});
    };
    run(2);
    CHECK(report.error.code == error_code::internal);
  }
  SECTION("a microbatch that does not exist") {
    make = [](uint64_t) {
      return std::make_unique<stubborn_schedule>(
        task{microbatch_id{2}, phase::forward});
    };
    run(2);
    CHECK(report.error.code == error_code::internal);
  }
}

TEST_CASE_METHOD(driver_fixture, "a schedule that throws fails the step",
                 "[actors][driver]") {
  SECTION("when it is made") {
    make = [](uint64_t n) { return make_schedule("simple", n, 1); };
    run(2);
    CHECK(report.error.code == error_code::config);
  }
  SECTION("later") {
    make = [](uint64_t) { return std::make_unique<throwing_schedule>(task{}); };
    run(1);
    forward_done(0);
    CHECK(take() == lines{"f0", "failed the schedule threw: user's bug"});
    ended(0);
    CHECK(report.error.code == error_code::internal);
  }
}
