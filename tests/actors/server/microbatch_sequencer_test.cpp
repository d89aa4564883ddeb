#include "tests/support/catch.hpp"

#include "actors/server/microbatch_sequencer.hpp"
#include "tests/support/error_of.hpp"

using namespace smp;
using namespace smp::test;

namespace {

constexpr module_id norm{3}, other{4};

struct sequencer_fixture {
  sequencer_fixture() {
    gate.set_modules({norm, other});
  }

  /// One step in which each microbatch calls `norm` so often, in order.
  void learn(const std::vector<int>& calls) {
    gate.begin_step(calls.size());
    for (uint64_t turn = 0; turn < calls.size(); ++turn) {
      for (int i = 0; i < calls[turn]; ++i)
        call(turn);
      gate.forward_over(turn);
    }
    gate.end_step(true);
  }

  bool open(uint64_t turn, std::vector<module_id> xs = {norm}) {
    return gate.open(xs, turn, microbatch_id{turn});
  }

  completion_ptr opening(uint64_t turn) {
    return gate.opening({norm}, turn, microbatch_id{turn});
  }

  /// One call that enters and is over.
  void call(uint64_t turn, module_id x = norm) {
    REQUIRE(open(turn, {x}));
    gate.leave({x}, turn);
  }

  /// Calls `norm` once more than in the steps before, too late.
  failure overtake(uint64_t turn) {
    return failure_of([&] { open(turn); });
  }

  microbatch_sequencer gate{
    rank_id{2}, [](module_id x) { return x == norm ? "norm" : "other"; }};
};

} // namespace

TEST_CASE_METHOD(sequencer_fixture,
                 "at first a microbatch waits for the forward phases before it",
                 "[actors][R19]") {
  gate.begin_step(3);
  CHECK(open(0));
  CHECK_FALSE(open(1));
  gate.leave({norm}, 0); // it may call the module again
  CHECK_FALSE(open(1));
  gate.forward_over(0);
  CHECK(open(1));
  CHECK_FALSE(open(2));
  CHECK(open(2, {module_id{9}})); // not ordered
}

TEST_CASE_METHOD(sequencer_fixture,
                 "once the number of calls is known nobody waits for more",
                 "[actors][R19]") {
  learn({2, 2, 2});
  gate.begin_step(3);
  call(0);
  CHECK_FALSE(open(1));
  call(0);
  CHECK(open(1));
  CHECK_FALSE(open(2));
  CHECK_FALSE(open(1, {norm, other})); // the other was never called
}

TEST_CASE_METHOD(sequencer_fixture,
                 "a microbatch that makes fewer calls passes at its end",
                 "[actors][R19]") {
  learn({2, 2});
  gate.begin_step(2);
  call(0);
  CHECK_FALSE(open(1));
  gate.forward_over(0);
  CHECK(open(1));
}

TEST_CASE_METHOD(sequencer_fixture,
                 "a module that is called unequally often keeps the sure rule",
                 "[actors][R19]") {
  learn({2, 1});
  learn({2, 2}); // too late
  gate.begin_step(2);
  call(0);
  call(0);
  CHECK_FALSE(open(1));
}

TEST_CASE_METHOD(sequencer_fixture, "a step that failed teaches nothing",
                 "[actors][R19]") {
  gate.begin_step(2);
  call(0);
  gate.forward_over(0);
  call(1);
  gate.end_step(false);
  gate.begin_step(2);
  call(0);
  CHECK_FALSE(open(1));
}

TEST_CASE_METHOD(sequencer_fixture,
                 "a call that comes after a younger microbatch is refused",
                 "[actors][R19]") {
  learn({1, 1, 1});
  gate.begin_step(3);
  call(0);
  auto called = GENERATE(true, false);
  REQUIRE(open(1)); // from here on the order of microbatch 0 is lost
  if (called)
    gate.leave({norm}, 1);
  CHECK_FALSE(gate.was_overtaken());
  auto why = overtake(0); // a second call, which nobody could expect
  CHECK(why.code == error_code::unsupported);
  CHECK(why.rank == rank_id{2});
  CHECK(why.module == "norm");
  CHECK_THAT(why.text, Catch::Matchers::StartsWith(
                         "microbatch 0 calls it more often than earlier"));
  auto local = opening(0);
  REQUIRE(local);
  CHECK(local->cause() == why);
  gate.end_step(false);
  CHECK(gate.was_overtaken());
  gate.begin_step(3);
  CHECK_FALSE(gate.was_overtaken());
  call(0);
  CHECK_FALSE(open(1)); // from now on the sure rule
  call(0);
  gate.forward_over(0);
  call(1);
  gate.forward_over(1);
  call(2);
}

TEST_CASE_METHOD(sequencer_fixture, "a call that is not over lets nobody pass",
                 "[actors][R19]") {
  learn({1, 1, 1});
  gate.begin_step(3);
  call(0);
  REQUIRE(open(0)); // once more, and before any younger one
  CHECK_FALSE(open(1));
  CHECK(opening(1));
  gate.leave({norm}, 0);
  CHECK(open(1));
}

TEST_CASE_METHOD(sequencer_fixture,
                 "of those that waited the older one enters first",
                 "[actors][R19]") {
  learn({1, 1, 1});
  gate.begin_step(3);
  REQUIRE(open(0));
  auto third = opening(2);
  auto second = opening(1);
  REQUIRE((second && third));
  gate.leave({norm}, 0);
  CHECK(second->done());
  CHECK_FALSE(third->done());
  gate.leave({norm}, 1);
  CHECK(third->done());
}

TEST_CASE_METHOD(sequencer_fixture,
                 "a module that cannot be taken back is not counted",
                 "[actors][R19]") {
  gate.set_modules({norm, other}, {norm});
  learn({1, 1});
  gate.begin_step(2);
  call(0);
  CHECK_FALSE(open(1));
  gate.forward_over(0);
  CHECK(open(1));
}

TEST_CASE_METHOD(sequencer_fixture,
                 "a call after the forward phase comes late and is no error",
                 "[actors][R19]") {
  gate.begin_step(2);
  call(0);
  gate.forward_over(0);
  call(1);
  CHECK(open(0));
}

TEST_CASE_METHOD(sequencer_fixture, "who waits is woken, and only then",
                 "[actors][R19]") {
  int moved = 0;
  gate.on_moved([&] { ++moved; });
  gate.begin_step(3);
  CHECK(opening(0) == nullptr);
  auto second = opening(1);
  auto third = opening(2);
  REQUIRE(second);
  gate.leave({norm}, 0);
  CHECK_FALSE(second->done());
  CHECK(moved == 0); // nobody asked with `open`
  CHECK_FALSE(open(2));
  gate.forward_over(0);
  CHECK(second->done());
  CHECK_FALSE(third->done());
  CHECK(moved == 1);
  gate.forward_over(1);
  CHECK(third->done());
  CHECK(moved == 1);
}

TEST_CASE_METHOD(sequencer_fixture, "a released module lets everybody in",
                 "[actors][R19]") {
  CHECK(gate.used());
  gate.set_modules({});
  CHECK_FALSE(gate.used());
  gate.begin_step(2);
  CHECK(open(1));
  CHECK(opening(1) == nullptr);
}

TEST_CASE_METHOD(sequencer_fixture, "the step body never passes by counting",
                 "[actors][R19]") {
  gate.set_modules({module_id{0}});
  for (int step = 0; step < 2; ++step) {
    gate.begin_step(2);
    call(0, module_id{0});
    CHECK_FALSE(open(1, {module_id{0}}));
    gate.forward_over(0);
    call(1, module_id{0});
    gate.end_step(true);
  }
}
