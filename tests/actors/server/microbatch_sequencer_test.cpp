#include "tests/support/catch.hpp"

#include "actors/protocol/request_number.hpp"
#include "actors/server/microbatch_sequencer.hpp"
#include "tests/support/actors/server_core_fixture.hpp"
#include "tests/support/error_of.hpp"

#include <memory>
#include <set>
#include <string>
#include <vector>

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
    for (uint64_t start_number = 0; start_number < calls.size();
         ++start_number) {
      for (int i = 0; i < calls[start_number]; ++i)
        call(start_number);
      gate.forward_over(start_number);
    }
    gate.end_step(true);
  }

  bool open(uint64_t start_number, std::vector<module_id> xs = {norm}) {
    return gate.open(xs, start_number, microbatch_id{start_number});
  }

  completion_ptr opening(uint64_t start_number) {
    return gate.opening({norm}, start_number, microbatch_id{start_number});
  }

  /// One call that enters and is over.
  void call(uint64_t start_number, module_id x = norm) {
    REQUIRE(open(start_number, {x}));
    gate.leave({x}, start_number);
  }

  /// Calls `norm` when a younger microbatch has been there.
  failure overtake(uint64_t start_number) {
    return failure_of([&] { open(start_number); });
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
  CHECK(gate.overtaken_modules().empty());
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
  CHECK(gate.overtaken_modules() == std::set{norm});
  gate.begin_step(3);
  CHECK(gate.overtaken_modules().empty());
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

// -- calls after the first backward -------------------------------------------

TEST_CASE_METHOD(sequencer_fixture,
                 "a late call holds the younger ones while it lasts",
                 "[actors][R19]") {
  gate.begin_step(3);
  call(0);
  gate.forward_over(0);
  CHECK(gate.called_late().empty());
  REQUIRE(open(0)); // nobody was there
  CHECK_FALSE(open(1));
  auto second = opening(1);
  REQUIRE(second);
  gate.leave({norm}, 0);
  CHECK(second->done());
  CHECK(gate.called_late() == std::set<module_id>{norm});
}

TEST_CASE_METHOD(sequencer_fixture,
                 "a late call may overtake the end of its forward phase",
                 "[actors][R19]") {
  gate.begin_step(2);
  call(0);
  REQUIRE(open(0));
  SECTION("on another rank than that of the body") {
    gate.forward_over(0, true);
    CHECK_FALSE(open(1));
    CHECK(gate.called_late() == std::set<module_id>{norm});
    gate.leave({norm}, 0);
  }
  SECTION("not where the backward may be a part of it") {
    gate.forward_over(0);
    CHECK(gate.called_late().empty());
  }
  CHECK(open(1));
}

TEST_CASE_METHOD(sequencer_fixture,
                 "a late call that comes after a younger microbatch is refused",
                 "[actors][R19]") {
  gate.begin_step(2);
  call(0);
  gate.forward_over(0);
  REQUIRE(open(1));
  auto called = GENERATE(true, false);
  if (called)
    gate.leave({norm}, 1);
  auto why = overtake(0);
  CHECK(why.code == error_code::unsupported);
  CHECK(why.rank == rank_id{2});
  CHECK(why.module == "norm");
  CHECK_THAT(why.text,
             Catch::Matchers::StartsWith(
               "microbatch 0 calls it after its first model.backward, when"));
  auto local = opening(0);
  REQUIRE(local);
  CHECK(local->cause() == why);
  CHECK(gate.called_late() == std::set<module_id>{norm});
  gate.end_step(false);
  CHECK(gate.called_late() == std::set<module_id>{norm});
  gate.begin_step(2);
  CHECK(gate.called_late().empty());
}

TEST_CASE_METHOD(sequencer_fixture,
                 "microbatches go one by one while a module needs it",
                 "[actors][R19]") {
  gate.set_serial({module_id{9}}); // not ordered
  CHECK_FALSE(gate.serial());
  gate.set_serial({norm});
  CHECK(gate.serial());
  gate.set_modules({norm});
  CHECK(gate.serial());
  gate.set_modules({other});
  CHECK_FALSE(gate.serial());
}

TEST_CASE("where calls come late a microbatch starts when the last one ended",
          "[actors][core][R19]") {
  auto gate = std::make_shared<microbatch_sequencer>();
  gate->set_modules({norm});
  core_fixture x{true, std::make_shared<execution_token>(), gate};
  x.enter(1);
  CHECK(x.out.take() == lines{"run 1"});
  x.core.end_step({step_id{1}, {}, {}});
  gate->set_serial({norm});
  x.out.take();
  x.enter(2);
  CHECK(x.out.take() == lines{"run 2 one by one"});
}

TEST_CASE("a record of a step does not make microbatches overlap again",
          "[actors][core][R19][R33]") {
  auto gate = std::make_shared<microbatch_sequencer>();
  gate->set_modules({norm});
  gate->set_serial({norm});
  auto records = std::make_shared<order_book>(
    order_book::options{.static_mode = true, .steps = 1});
  noted_output out;
  function_services services;
  server_core core{{.self = rank_id{0},
                    .leader = true,
                    .fabric = out.net,
                    .services = services,
                    .board = out.board,
                    .token = std::make_shared<execution_token>(),
                    .on_token = [] {},
                    .sequencer = gate,
                    .records = records},
                   out};
  for (uint64_t step : {1, 2}) {
    core.enter({step_id{step}, 1});
    CHECK(out.lines.back() == "run " + std::to_string(step) + " one by one");
    auto number = root_request_number(step_id{step}, microbatch_id{0});
    core.receive(request{{rank_id{0}, number},
                         step_id{step},
                         microbatch_id{0},
                         root_module,
                         phase::forward,
                         {}});
    core.finish(out.executing, {});
    core.end_step({step_id{step}, {}, {}});
    records->took(step_id{step}, 1);
    CHECK(records->note().replayed == (step == 2));
  }
}

// -- who is told --------------------------------------------------------------

TEST_CASE_METHOD(sequencer_fixture, "a call that waits is woken, and only then",
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
