#include "tests/support/catch.hpp"

#include "actors/schedule/schedule_actor.hpp"
#include "actors/schedule/user_schedule.hpp"
#include "partition/schedule/checker.hpp"
#include "tests/support/actors/actor_world.hpp"

#include <chrono>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

using namespace smp;
using namespace std::chrono_literals;
using Catch::Matchers::ContainsSubstring;

namespace {

/// 1F1B as a user would write it, and what it heard.
struct tidy_state {
  static inline const char* name = "test.tidy";

  schedule_answer next() {
    if (turning < size && ready.at(turning))
      return start_backward(microbatch_id{turning++});
    if (started < size && alive < active) {
      ++alive;
      return start_forward(microbatch_id{started++});
    }
    return wait_for_event();
  }

  uint64_t size = 0;
  uint64_t active = 0;
  uint64_t started = 0;
  uint64_t turning = 0;
  uint64_t alive = 0;
  std::vector<bool> ready;
};

std::vector<std::string>* heard = nullptr;
int instances = 0;

template <class T>
void hear(const T& x) {
  if (heard)
    heard->push_back(to_string(schedule_event{x}));
}

schedule_actor::behavior_type
tidy(schedule_actor::stateful_pointer<tidy_state> self, schedule_setup) {
  ++instances;
  auto& st = self->state;
  return {
    [&st](const step_begins& x) {
      hear(x);
      st = {};
      st.size = x.microbatches;
      st.active = x.active;
      st.ready.resize(x.microbatches);
      return st.next();
    },
    [&st](const task_started& x) {
      hear(x);
      return st.next();
    },
    [&st](const forward_ended& x) {
      hear(x);
      return st.next();
    },
    [&st](const backward_ready& x) {
      hear(x);
      st.ready[x.microbatch.value] = true;
      return st.next();
    },
    [&st](const backward_ended& x) {
      hear(x);
      --st.alive;
      return st.next();
    },
    [&st](const memory_level& x) {
      hear(x);
      return st.next();
    },
    [&st](const rank_activity& x) {
      hear(x);
      return st.next();
    },
  };
}

/// What a faulty actor does when the backward phase of microbatch 1 is ready;
/// until then it is tidy.
enum class fault { throws, silent, nonsense, twice, waits, quits };

fault chosen = fault::throws;
bool cured = false; // later instances are tidy

struct faulty_state : tidy_state {
  static inline const char* name = "test.faulty";
  caf::typed_response_promise<schedule_answer> never;
  bool good = false;
  uint64_t waiting = 0;
};

schedule_actor::behavior_type
faulty(schedule_actor::stateful_pointer<faulty_state> self, schedule_setup) {
  ++instances;
  auto& st = self->state;
  st.good = cured;
  auto next = [&st] { return st.next(); };
  return {
    [&st](const step_begins& x) {
      static_cast<tidy_state&>(st) = {};
      st.size = x.microbatches;
      st.active = x.active;
      st.ready.resize(x.microbatches);
      return st.next();
    },
    [next](const task_started&) { return next(); },
    [next](const forward_ended&) { return next(); },
    [self, &st](const backward_ready& x) -> caf::result<schedule_answer> {
      st.ready[x.microbatch.value] = true;
      if (st.good || x.microbatch.value != 1)
        return st.next();
      switch (chosen) {
        case fault::throws:
          throw std::out_of_range("my mistake");
        case fault::silent:
          st.never = self->make_response_promise<schedule_answer>();
          return st.never;
        case fault::nonsense:
          return start_forward(microbatch_id{77});
        case fault::twice:
          return start_forward(microbatch_id{0});
        case fault::waits:
          st.size = 0; // nothing any more
          return wait_for_event();
        default:
          self->quit();
          st.never = self->make_response_promise<schedule_answer>();
          return st.never;
      }
    },
    [&st](const backward_ended&) {
      --st.alive;
      return st.next();
    },
    [next](const memory_level&) { return next(); },
    [next](const rank_activity&) { return next(); },
  };
}

std::shared_ptr<const user_schedule>
make_user(std::shared_ptr<const schedule_actor_type> type) {
  auto result = std::make_shared<user_schedule>();
  result->type = std::move(type);
  result->partitions = 2;
  result->active = [](uint64_t) { return uint64_t{3}; };
  result->timeout = std::chrono::milliseconds{50};
  result->own_thread = false;
  return result;
}

/// Two ranks; module 1 is on rank 1.
struct user_world : actor_world {
  user_world() {
    script[root_module] = {do_call(1, 1), do_grant(),
                           do_call(1, 1, phase::backward), do_return("done ")};
    script[module_id{1}] = {do_return("m")};
  }

  void init_with(std::shared_ptr<const user_schedule> x, options how = {}) {
    how.user = std::move(x);
    init(how);
  }

  /// Plays until nothing happens any more, then lets time pass.
  void run_and_wait() {
    run();
    sched.advance_time(std::chrono::milliseconds{60});
    run();
  }
};

} // namespace

TEST_CASE_METHOD(user_world, "a step follows the actor of the user",
                 "[actors][schedule]") {
  std::vector<std::string> log;
  heard = &log;
  instances = 0;
  init_with(make_user(make_schedule_actor_type("tidy", tidy)));
  auto report = step(1, 4);
  heard = nullptr;
  CHECK_FALSE(report.error);
  CHECK(texts(report).size() == 4);
  CHECK(log.front() == "step 1 begins");
  auto count = [&](const std::string& what) {
    return std::count_if(log.begin(), log.end(), [&](auto& x) {
      return x.find(what) != std::string::npos;
    });
  };
  CHECK(count("started") == 8);
  CHECK(count("forward ended") == 4);
  CHECK(count("backward ready") == 4);
  CHECK(count("rank 1 is busy") > 0);
  CHECK(count("rank 1 is idle") > 0);
  CHECK(count("rank 0 is busy") > 0);
  // One instance serves all steps.
  CHECK_FALSE(step(2, 2).error);
  CHECK(instances == 1);
}

TEST_CASE("a step follows the actor in any order of messages",
          "[actors][schedule]") {
  for (uint64_t seed = 1; seed <= 30; ++seed) {
    INFO("seed " << seed);
    user_world world;
    actor_world::options how;
    how.seed = seed;
    how.reorder = true;
    world.init_with(make_user(make_schedule_actor_type("tidy", tidy)), how);
    for (uint64_t n : {1, 2, 5}) {
      auto report = world.step(n, n);
      CHECK_FALSE(report.error);
      CHECK(actor_world::texts(report).size() == n);
    }
  }
}

TEST_CASE("memory levels reach the actor", "[actors][schedule]") {
  std::vector<std::string> log;
  heard = &log;
  user_world world;
  auto x = std::make_shared<user_schedule>(
    *make_user(make_schedule_actor_type("tidy", tidy)));
  uint64_t used = 1000;
  x->memory_in_use = [&used] { return used += 10; };
  world.init_with(x);
  CHECK_FALSE(world.step(1, 2).error);
  heard = nullptr;
  auto level = std::find_if(log.begin(), log.end(), [](auto& y) {
    return y.starts_with("rank 1 keeps ");
  });
  REQUIRE(level != log.end());
  // Above the level at the begin of the step, not above zero.
  CHECK(std::stoi(level->substr(13)) < 1000);
}

TEST_CASE_METHOD(user_world, "a faulty actor ends the step with its name",
                 "[actors][schedule][R34]") {
  struct expectation {
    fault what;
    const char* text;
    error_code code;
  };
  auto [what, text, code] = GENERATE(
    expectation{fault::throws, "threw: my mistake", error_code::schedule},
    expectation{fault::silent, "did not answer within 0.05 s",
                error_code::stalled},
    expectation{fault::nonsense,
                "answers [77, \"forward\"] in a step of 4 microbatches",
                error_code::schedule},
    expectation{fault::twice, "answers [0, \"forward\"] a second time",
                error_code::schedule},
    expectation{fault::quits, "ended without an answer", error_code::schedule});
  INFO(text);
  chosen = what;
  cured = false;
  instances = 0;
  init_with(make_user(make_schedule_actor_type("faulty", faulty)));
  enter_all(1, 4);
  run_and_wait();
  for (auto& x : ranks) {
    REQUIRE(x->report);
    CHECK(x->report->error.code == code);
    CHECK(x->report->error.text
          == std::string{"schedule actor \"faulty\" "} + text
               + " (event: backward ready, microbatch 1)");
  }
  // The session goes on, with a new instance.
  cured = true;
  CHECK_FALSE(step(2, 4).error);
  CHECK(instances == 2);
}

TEST_CASE_METHOD(user_world, "an actor that waits for nothing stalls no step",
                 "[actors][schedule][R34]") {
  chosen = fault::waits;
  cured = false;
  init_with(make_user(make_schedule_actor_type("faulty", faulty)));
  enter_all(1, 4);
  run();
  REQUIRE(ranks[0]->report);
  auto& error = ranks[0]->report->error;
  CHECK(error.code == error_code::stalled);
  CHECK_THAT(error.text, ContainsSubstring("waits although nothing is in "
                                           "flight"));
}

// -- rehearsal ----------------------------------------------------------------

namespace {

pipeline_program two_stages() {
  pipeline_program result;
  result.devices = 2;
  result.chain = {{0, 1, 2, 1, false, 0}, {1, 1, 2, 1, false, 0}};
  return result;
}

/// @param timeout of each question: on a busy machine some answer late
schedule_report rehearsed(std::shared_ptr<const schedule_actor_type> type,
                          uint64_t microbatches,
                          std::chrono::milliseconds timeout = 30s) {
  auto x = std::make_shared<user_schedule>(*make_user(std::move(type)));
  x->own_thread = true;
  x->timeout = timeout;
  actor_host host;
  auto policy = rehearse(host, *x, microbatches);
  check_options options;
  options.microbatches = microbatches;
  options.active = 3;
  return check_schedule(two_stages(), *policy, options);
}

} // namespace

TEST_CASE("a user's actor is played before the first step",
          "[actors][schedule][R34]") {
  auto report = rehearsed(make_schedule_actor_type("tidy", tidy), 4);
  CHECK(report.makespan == Catch::Approx(15));
  CHECK(report.peak_active == 3);
}

TEST_CASE("a faulty actor is found before the first step",
          "[actors][schedule][R34]") {
  cured = false;
  for (auto [what, text] : {std::pair{fault::throws, "threw: my mistake"},
                            {fault::silent, "did not answer within 0.2 s"},
                            {fault::nonsense, "[77, \"forward\"]"},
                            {fault::twice, "a second time"}}) {
    chosen = what;
    std::chrono::milliseconds timeout = what == fault::silent ? 200ms : 30s;
    CHECK_THROWS_WITH(
      rehearsed(make_schedule_actor_type("faulty", faulty), 4, timeout),
      ContainsSubstring(text)
        && ContainsSubstring("schedule actor \"faulty\""));
  }
}

// -- plug-ins -----------------------------------------------------------------

TEST_CASE("a file that is not a plug-in is refused by its key",
          "[actors][schedule]") {
  CHECK_THROWS_WITH(load_schedule_actor("/nowhere/none.so", "x"),
                    ContainsSubstring("smp.schedule.plugin")
                      && ContainsSubstring("/nowhere/none.so"));
  // A library, but no plug-in.
  CHECK_THROWS_WITH(load_schedule_actor("libm.so.6", "x"),
                    ContainsSubstring("SMP_SCHEDULES"));
}
