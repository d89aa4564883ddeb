#include "tests/support/catch.hpp"

#include "tests/support/actors/actor_world.hpp"
#include "tests/support/actors/server_core_fixture.hpp"

#include <algorithm>
#include <string>
#include <vector>

// R33 with all actors, over a network whose messages overtake each other.

using namespace smp;

using Catch::Matchers::ContainsSubstring;

namespace {

using texts_t = std::vector<std::string>;

struct static_world : actor_world {
  static_world() {
    // Nested and repeated calls, also back to the rank they come from.
    script[root_module] = {do_call(1, 1),
                           do_call(2, 2),
                           do_call(1, 4),
                           do_grant(),
                           do_call(1, 1, phase::backward),
                           do_call(1, 4, phase::backward),
                           do_return("r")};
    script[{1}] = {do_call(0, 3), do_call(2, 2), do_return("a")};
    script[{2}] = {do_return("b")};
    script[{3}] = {do_call(2, 2), do_return("c")};
    script[{4}] = {do_return("d")};
  }

  void init(uint64_t seed, order_book::options records,
            const std::string& schedule = "interleaved") {
    actor_world::init({.world_size = 3,
                       .seed = seed,
                       .reorder = true,
                       .schedule = schedule,
                       .active = 6,
                       .records = records});
  }

  /// Runs a step and notes that it took `seconds`.
  step_report timed_step(uint64_t number, double seconds,
                         uint64_t microbatches = 4) {
    trace.clear();
    auto result = step(number, microbatches);
    ranks[0]->records->took(step_id{number}, seconds);
    traces[number] = trace;
    return result;
  }

  /// What `rank` started and went on with, one after the other.
  texts_t served(uint64_t number, uint64_t rank) {
    texts_t result;
    auto prefix = std::to_string(rank) + ": ";
    for (auto& x : traces.at(number))
      if (x.starts_with(prefix) && !x.ends_with("end"))
        result.push_back(x);
    return result;
  }

  /// The nth record of a test takes this long: the second is the fastest.
  static double seconds(uint64_t step) {
    return step == 2 ? 1 : 2;
  }

  order_book::step_note note(size_t rank = 0) {
    return ranks[rank]->records->note();
  }

  std::map<uint64_t, texts_t> traces; // by step
};

constexpr order_book::options three_steps{.static_mode = true, .steps = 3};

} // namespace

TEST_CASE_METHOD(static_world,
                 "a replay keeps the order of the fastest recorded step",
                 "[actors][static][R33]") {
  auto seed = GENERATE(Catch::Generators::range(1, 11));
  auto schedule = GENERATE("simple", "interleaved", "1f1b");
  INFO("seed " << seed << " " << schedule);
  init(static_cast<uint64_t>(seed), three_steps, schedule);
  for (uint64_t n = 1; n <= 3; ++n)
    CHECK(texts(timed_step(n, seconds(n))) == texts_t(4, "rd"));
  auto made = schedules;
  for (uint64_t n = 4; n <= 8; ++n) {
    CHECK(texts(timed_step(n, 0)) == texts_t(4, "rd"));
    for (size_t rank = 0; rank < 3; ++rank) {
      CHECK(served(n, rank) == served(2, rank));
      CHECK(note(rank).replayed);
      CHECK(note(rank).divergence.empty());
      CHECK(status(rank).pending == 0);
      CHECK(status(rank).unknown == 0);
    }
  }
  CHECK(schedules == made); // nobody decided anything
}

TEST_CASE_METHOD(static_world, "a record that is not replayed shows itself",
                 "[actors][static]") {
  // The check above is worth something only if timing moves the order.
  init(7, three_steps);
  for (uint64_t n = 1; n <= 3; ++n)
    timed_step(n, seconds(n));
  auto differ = [&](size_t rank) {
    return served(1, rank) != served(2, rank)
           || served(3, rank) != served(2, rank);
  };
  CHECK((differ(0) || differ(1) || differ(2)));
}

TEST_CASE_METHOD(static_world, "what modules answer may differ from the record",
                 "[actors][static][R33]") {
  init(4, {.static_mode = true, .steps = 1});
  CHECK(texts(timed_step(1, 1)) == texts_t(4, "rd"));
  script[{4}] = {do_return("another")};
  CHECK(texts(timed_step(2, 1)) == texts_t(4, "ranother"));
  CHECK(note(0).replayed);
  CHECK(note(0).divergence.empty());
}

TEST_CASE_METHOD(static_world, "steps of another key have records of their own",
                 "[actors][static][R33]") {
  init(3, {.static_mode = true, .steps = 1});
  auto& records = *ranks[0]->records;
  records.set_key(1);
  timed_step(1, 1);
  records.set_key(2);
  auto training = script[root_module];
  script[root_module] = {do_call(1, 1), do_return("e")}; // R4
  CHECK(texts(timed_step(2, 1, 2)) == texts_t(2, "eab"));
  CHECK(note(2).recorded);
  CHECK(texts(timed_step(3, 1, 2)) == texts_t(2, "eab"));
  CHECK(note(2).replayed);
  records.set_key(1);
  script[root_module] = training;
  CHECK(texts(timed_step(4, 1)) == texts_t(4, "rd"));
  CHECK(note(2).replayed);
}

TEST_CASE_METHOD(static_world, "a failed step leaves no record",
                 "[actors][static][R33]") {
  init(2, {.static_mode = true, .steps = 1});
  auto good = script[{2}];
  script[{2}] = {do_throw("boom")};
  CHECK(timed_step(1, 1).error.text == "boom");
  script[{2}] = good;
  CHECK(texts(timed_step(2, 1)) == texts_t(4, "rd"));
  CHECK(note(1).recorded);
  // A failure in a replayed step is what it was.
  script[{2}] = {do_throw("bang")};
  CHECK(timed_step(3, 1).error.text == "bang");
  script[{2}] = good;
  CHECK(texts(timed_step(4, 1)) == texts_t(4, "rd"));
  CHECK(note(1).replayed);
}

// -- divergences --------------------------------------------------------------

TEST_CASE_METHOD(static_world, "a divergence is told with its place",
                 "[actors][static][R33]") {
  init(4, {.static_mode = true, .steps = 1});
  timed_step(1, 1);
  std::string expected;
  SECTION("another module") {
    script[{1}][1] = do_call(2, 5);
    script[{5}] = {do_return("f")};
    expected
      = "rank 1, module m1: microbatch 0 diverges from step 1, which "
        "smp.static_mode replays: the record calls module 2, forward, "
        "on rank 2, this step calls module 5, forward, on rank 2";
  }
  SECTION("another rank") {
    script[{1}][1] = do_call(0, 3);
    expected = "calls module 3, forward, on rank 0";
  }
  SECTION("a call less") {
    script[{1}] = {do_call(0, 3), do_return("a")};
    expected
      = "the record calls module 2, forward, on rank 2, this step ends "
        "here";
  }
  SECTION("a call more") {
    script[{2}] = {do_call(0, 4), do_return("a")};
    expected
      = "the record ends here, this step calls module 4, forward, on "
        "rank 0";
  }
  SECTION("no backward phase") {
    script[root_module] = {do_call(1, 1), do_call(2, 2), do_call(1, 4),
                           do_return("r")};
    expected
      = "the record waits for the grant of its backward phase, this "
        "step ends here";
  }
  CHECK_FALSE(timed_step(2, 1).error);
  CHECK_THAT(note(0).divergence, ContainsSubstring(expected));
}

TEST_CASE_METHOD(static_world,
                 "a divergence is an error where others rely on the order",
                 "[actors][static][R33]") {
  init(4, {.fixed_order = true});
  timed_step(1, 1);
  for (auto& rank : ranks) {
    auto& records = *rank->records;
    records.choose(0, step_id{1}, *records.find(0, step_id{1}), 7);
  }
  auto plan = ranks[0]->records->propose();
  ranks[0]->records->agree({plan, plan}); // of two pipelines
  script[{1}] = {do_call(0, 3), do_return("a")};
  auto err = timed_step(2, 1).error;
  CHECK(err.code == error_code::unsupported);
  CHECK_THAT(err.describe(),
             ContainsSubstring("which smp.deterministic_server replays: the "
                               "record calls module 2, forward, on rank 2, "
                               "this step ends here (write "
                               "smp.deterministic_server = false)"));
  for (size_t i = 0; i < 3; ++i)
    CHECK(status(i).pending == 0);
}

TEST_CASE_METHOD(static_world, "a divergent step goes on without the record",
                 "[actors][static][R33]") {
  auto seed = GENERATE(Catch::Generators::range(1, 21));
  INFO("seed " << seed);
  init(static_cast<uint64_t>(seed), {.static_mode = true, .steps = 1});
  timed_step(1, 1);
  auto usual = script;
  std::string value = "rd";
  SECTION("another module") {
    script[{1}][1] = do_call(0, 5);
    script[{5}] = {do_return("f")};
  }
  SECTION("a call less") {
    script[{1}] = {do_return("a")};
  }
  SECTION("more calls") {
    script[{2}] = {do_call(0, 4), do_call(1, 4), do_return("b")};
  }
  SECTION("no backward phase") {
    script[root_module] = {do_call(1, 1), do_return("r")};
    value = "rab";
  }
  CHECK(texts(timed_step(2, 1)) == texts_t(4, value));
  CHECK(note(0).replayed);
  CHECK_THAT(note(0).divergence, ContainsSubstring("microbatch"));
  for (size_t i = 0; i < 3; ++i)
    CHECK(status(i).pending == 0);
  // The record is as good as before.
  script = usual;
  CHECK(texts(timed_step(3, 1)) == texts_t(4, "rd"));
  for (size_t i = 0; i < 3; ++i) {
    CHECK(note(i).replayed);
    CHECK(note(i).divergence.empty());
    CHECK(served(3, i) == served(1, i));
  }
}

TEST_CASE_METHOD(static_world,
                 "who waits for something else keeps its place in the order",
                 "[actors][static][R33]") {
  // Rank 1 waits in module 4; in the record that was over at once.
  auto event = std::make_shared<completion>();
  event->set();
  script[{4}] = {do_wait(event), do_return("d")};
  auto seed = GENERATE(Catch::Generators::range(1, 11));
  INFO("seed " << seed);
  init(static_cast<uint64_t>(seed), {.static_mode = true, .steps = 1});
  timed_step(1, 1);
  for (uint64_t n = 2; n <= 4; ++n) {
    event = std::make_shared<completion>();
    script[{4}][0] = do_wait(event);
    enter_all(n, 4);
    run();
    event->set();
    run();
    CHECK(texts(ranks[0]->report.value()) == texts_t(4, "rd"));
    CHECK(note(1).divergence.empty());
  }
}

// That the flow diverges is told by the first rank of another pipeline here.
TEST_CASE_METHOD(
  test::replaying_core,
  "a pipeline leaves its record with one that shares its modules",
  "[actors][static][R33]") {
  auto play = [&](uint64_t n, auto f) {
    core.enter({step_id{n}, 1});
    f();
    end_step(n);
    return out.take();
  };
  auto nothing = [] {};
  play(1, nothing);
  auto told = [&](uint64_t n) { core.diverge({step_id{n}, "there"}); };
  auto during = play(2, [&] {
    told(2);
    told(2);
  });
  CHECK(std::ranges::count(during, "diverged there") == 1);
  CHECK(records->note().divergence == "there");
  told(3); // it is faster
  auto before = play(3, nothing);
  // Who runs the microbatches hears of the record first.
  CHECK(std::ranges::find(before, "run 3")
        < std::ranges::find(before, "diverged there"));
  CHECK(std::ranges::count(before, "diverged there") == 1);
  play(4, nothing);
  CHECK(records->note().replayed);
  CHECK(records->note().divergence.empty());
}

// -- losses -------------------------------------------------------------------

TEST_CASE_METHOD(static_world, "the loss of pp_rank 0 ends a wait for its plan",
                 "[actors][static][R33]") {
  init(1, three_steps);
  enter(1, 1, 2); // pp_rank 0 never enters
  enter(2, 1, 2);
  run();
  CHECK(status(1).in_step);
  CHECK_FALSE(ranks[1]->report);
  auto cause = failure{error_code::rank_down, rank_id{0}, {}, "killed"};
  for (size_t i : {1, 2})
    caf::anon_send(server(i), down_atom_v, cause);
  run();
  for (size_t i : {1, 2}) {
    REQUIRE(ranks[i]->report);
    CHECK(ranks[i]->report->error == cause);
    CHECK_FALSE(status(i).in_step);
  }
}
