#include "tests/support/catch.hpp"

#include "actors/protocol/request_number.hpp"
#include "tests/support/actors/server_core_fixture.hpp"

#include <memory>
#include <string>
#include <vector>

using namespace smp;
using namespace smp::test;

// -- service order ------------------------------------------------------------

TEST_CASE_METHOD(follower_fixture,
                 "backward goes first, then the older microbatch",
                 "[actors][core]") {
  enter(1, 9);
  receive(1, 1, 5);
  receive(2, 1, 4);
  receive(3, 1, 3);
  receive(4, 1, 8, phase::backward);
  CHECK(out.take() == lines{"start c1 mb5"});
  finish();
  CHECK(out.take() == lines{"answer 1", "start c1 mb8"});
  finish();
  CHECK(out.take() == lines{"answer 4", "start c1 mb3"});
  finish();
  finish();
  CHECK(out.take() == lines{"answer 3", "start c1 mb4", "answer 2"});
  CHECK(core.num_contexts() == 1); // used again
}

TEST_CASE_METHOD(follower_fixture,
                 "an answered call competes with new requests",
                 "[actors][core]") {
  enter(1);
  receive(1, 1, 0);
  call_remote(2, phase::backward);
  auto id = out.asked.id;
  receive(2, 1, 0);
  receive(3, 1, 1);
  core.receive(response{id, {}, {}});
  CHECK(out.take() == lines{"start c1 mb0", "ask r2", "start c2 mb0"});
  finish();
  CHECK(out.take() == lines{"answer 2", "resume c1"});
}

TEST_CASE_METHOD(leader_fixture,
                 "who sent promises hears the SCHEDULER before others go on",
                 "[actors][core]") {
  enter(1);
  receive(10, 1, 0, phase::forward, 0);
  receive(11, 1, 1, phase::forward, 0);
  call promise;
  promise.kind = call_kind::promise;
  promise.owner = rank_id{1};
  promise.number = promise_number(step_id{1}, 1);
  promise.answer = std::make_shared<awaited<response>>();
  core.issue(out.executing, std::move(promise));
  call x;
  x.kind = call_kind::grant;
  x.what = phase::backward;
  core.suspend(out.executing, std::move(x));
  CHECK(out.take()
        == lines{"run 1", "start c1 mb0", "ask r1", "forward done mb0"});
  SECTION("its own grant goes first") {
    core.receive(response{out.waiting.id, {}, {}});
    CHECK(out.take().empty());
    core.decided(out.waiting.id);
    CHECK(out.take() == lines{"resume c1"});
  }
  SECTION("without one others go on") {
    core.decided(out.waiting.id);
    CHECK(out.take() == lines{"start c2 mb1"});
  }
  SECTION("a failure does not wait for ever") {
    core.fail_step({step_id{1}, user_error("boom")});
    core.decided(out.waiting.id);
    CHECK(out.take()
          == lines{"failed boom", "answer 11 boom", "resume c1 boom"});
  }
}

TEST_CASE_METHOD(follower_fixture,
                 "the context that ended last takes the next request",
                 "[actors][core]") {
  // Its thread is awake; that of the other one would have to be woken.
  enter(1);
  receive(1, 1, 0);
  call_remote(2);
  auto first = out.asked.id;
  receive(2, 1, 1);
  call_remote(2);
  auto second = out.asked.id;
  core.receive(response{first, {}, {}});
  finish();
  core.receive(response{second, {}, {}});
  receive(3, 1, 2);
  CHECK(out.take()
        == lines{"start c1 mb0", "ask r2", "start c2 mb1", "ask r2",
                 "resume c1", "answer 1", "resume c2"});
  finish();
  CHECK(out.take() == lines{"answer 2", "start c2 mb2"});
  CHECK(core.num_contexts() == 2);
}

// -- order (R19) --------------------------------------------------------------

namespace {

/// Module 7, which all requests of the fixture ask for, is ordered.
struct ordered_fixture : core_fixture {
  ordered_fixture()
    : ordered_fixture(std::make_shared<microbatch_sequencer>()) {
    // nop
  }

  explicit ordered_fixture(std::shared_ptr<microbatch_sequencer> x)
    : core_fixture(false, std::make_shared<execution_token>(), x),
      gate(std::move(x)) {
    services.ordered = [](const request& x) {
      return x.what == phase::forward ? std::vector{x.module}
                                      : std::vector<module_id>{};
    };
    gate->set_modules({module_id{7}});
    gate->on_moved([this] { ++moved; });
  }

  void receive_turn(uint64_t number, uint64_t start_number, uint64_t step = 1) {
    core.receive(request{{rank_id{1}, number},
                         step_id{step},
                         microbatch_id{start_number},
                         module_id{7},
                         phase::forward,
                         {},
                         start_number});
  }

  std::shared_ptr<microbatch_sequencer> gate;
  int moved = 0;
};

} // namespace

TEST_CASE_METHOD(ordered_fixture,
                 "a request that a younger microbatch overtook ends the step",
                 "[actors][core][R19]") {
  for (uint64_t step : {1, 2}) {
    enter(step, 2);
    receive_turn(10 * step, 0, step);
    finish();
    if (step == 1) // in step 2 it is as often as then: the next one may enter
      core.end_forward({step_id{1}, 0});
    receive_turn(10 * step + 1, 1, step);
    if (step == 1) {
      finish();
      core.end_step({step_id{1}, std::vector<payload>(2), {}});
    }
  }
  out.take();
  receive_turn(22, 0, 2);
  auto xs = out.take();
  REQUIRE(xs.size() == 2);
  CHECK(xs[0].starts_with("failed microbatch 0 calls it more often than"));
  CHECK(xs[1].starts_with("answer 22 microbatch 0 calls it more often than"));
}

TEST_CASE_METHOD(ordered_fixture,
                 "a request before its turn takes neither context nor token",
                 "[actors][core][R19]") {
  enter(1, 3);
  receive_turn(1, 1);
  CHECK(out.take().empty());
  CHECK(core.num_held() == 1);
  receive(2, 1, 2, phase::backward); // others go on
  CHECK(out.take() == lines{"start c1 mb2"});
  finish();
  receive_turn(3, 0);
  finish();
  CHECK(out.take() == lines{"answer 2", "start c1 mb0", "answer 3"});
  CHECK(moved == 1); // but the first one may call the module again
  core.turns_moved();
  CHECK(core.num_held() == 1);
  core.end_forward({step_id{1}, 0});
  REQUIRE(moved == 2);
  core.turns_moved();
  CHECK(out.take() == lines{"start c1 mb1"});
  CHECK(core.num_held() == 0);
}

TEST_CASE_METHOD(ordered_fixture, "a failure answers what is held",
                 "[actors][core][R19]") {
  enter(1, 3);
  receive_turn(1, 1);
  core.fail_step({step_id{1}, user_error("boom")});
  CHECK(out.take() == lines{"failed boom", "answer 1 boom"});
  core.rank_down(death(2, "gone"));
  CHECK(core.num_held() == 0);
}

TEST_CASE_METHOD(ordered_fixture,
                 "the end of a forward phase may come before the step begins",
                 "[actors][core][R19]") {
  core.end_forward({step_id{1}, 0});
  receive_turn(1, 1);
  enter(1, 2);
  CHECK(out.take() == lines{"start c1 mb1"});
}

// -- gate (R1) ----------------------------------------------------------------

TEST_CASE_METHOD(follower_fixture,
                 "requests of a later step wait, those of an older are dropped",
                 "[actors][core]") {
  receive(1, 0, 0);
  CHECK(core.num_later() == 1); // nothing was entered yet
  enter(4);
  CHECK(core.num_dropped() == 1);
  receive(2, 5, 0);
  receive(3, 3, 0);
  CHECK(core.num_later() == 1);
  CHECK(core.num_dropped() == 2);
  core.end_step({step_id{4}, {}, {}});
  receive(4, 4, 0);
  CHECK(core.num_dropped() == 3);
  CHECK(out.take() == lines{"over s4 mb0", "over s4 mb1", "step 4 over"});
  enter(5);
  CHECK(out.take() == lines{"start c1 mb0"});
}

TEST_CASE_METHOD(follower_fixture, "a step begins once and in order",
                 "[actors][core]") {
  enter(3);
  CHECK_THROWS_AS(enter(4), error);
  core.end_step({step_id{3}, {}, {}});
  CHECK_THROWS_AS(enter(3), error);
  enter(4);
}

TEST_CASE_METHOD(follower_fixture,
                 "the end of a step waits until this rank enters it",
                 "[actors][core]") {
  core.end_step({step_id{1}, std::vector<payload>(2), {}});
  core.end_step({step_id{2}, {}, user_error("boom")});
  CHECK(out.take().empty());
  enter(1);
  CHECK(out.take() == lines{"over s1 mb0", "over s1 mb1", "step 1 over"});
  CHECK(out.report.values.size() == 2);
  enter(2, 1);
  CHECK(out.take() == lines{"over s2 mb0", "step 2 over boom"});
}

TEST_CASE_METHOD(follower_fixture,
                 "a step that failed before this rank entered answers at once",
                 "[actors][core]") {
  receive(1, 1, 0);
  core.fail_step({step_id{1}, user_error("boom")});
  CHECK(out.take().empty());
  enter(1);
  CHECK(out.take() == lines{"failed boom", "answer 1 boom"});
}

// -- microbatches (R3) --------------------------------------------------------

TEST_CASE_METHOD(follower_fixture, "each microbatch ends exactly once",
                 "[actors][core]") {
  core.end_microbatch({step_id{1}, microbatch_id{0}}); // overtook the step
  enter(1, 3);
  core.end_microbatch({step_id{1}, microbatch_id{1}});
  core.end_microbatch({step_id{1}, microbatch_id{1}});
  core.end_microbatch({step_id{1}, microbatch_id{3}}); // no such one
  CHECK(out.take() == lines{"over s1 mb1"});
  core.end_step({step_id{1}, {}, {}});
  CHECK(out.take() == lines{"over s1 mb0", "over s1 mb2", "step 1 over"});
  core.end_microbatch({step_id{1}, microbatch_id{2}}); // overtaken by the end
  CHECK(out.take().empty());
}

// -- failures -----------------------------------------------------------------

TEST_CASE_METHOD(leader_fixture,
                 "the first failure ends grants, waits and queued requests",
                 "[actors][core]") {
  enter(1, 5);
  receive(10, 1, 0, phase::forward, 0);
  call_other(call_kind::grant);
  receive(11, 1, 1, phase::forward, 0);
  call_other(call_kind::wait);
  receive(12, 1, 2, phase::forward, 0);
  call_remote(1);
  auto id = out.asked.id;
  receive(13, 1, 3, phase::forward, 0); // executes
  receive(14, 1, 4);                    // queued
  out.take();
  finish(user_error("boom"));
  CHECK(out.take()
        == lines{"failed boom", "answer 14 boom", "answer 13 boom",
                 "resume c1 boom"});
  finish(out.last.error);
  finish(out.last.error);
  CHECK(out.take()
        == lines{"answer 10 boom", "resume c2 boom", "answer 11 boom"});
  CHECK(core.num_pending() == 1); // a live rank still answers
  core.receive(response{id, {}, {}});
  CHECK(out.take() == lines{"resume c3"});
  call_remote(1); // code that swallowed the error gets no further
  CHECK(out.take() == lines{"resume c3 boom"});
  finish(out.last.error);
  CHECK(out.take() == lines{"answer 12 boom"});
  core.end_step({step_id{1}, {}, user_error("boom")});
  CHECK_FALSE(core.in_step());
}

TEST_CASE_METHOD(follower_fixture, "a request of a failed step is not run",
                 "[actors][core]") {
  enter(1);
  core.fail_step({step_id{1}, user_error("boom")});
  core.fail_step({step_id{1}, user_error("later")});
  receive(1, 1, 0);
  CHECK(out.take() == lines{"failed boom", "answer 1 boom"});
}

TEST_CASE_METHOD(follower_fixture,
                 "an error response fails the step and resumes its context",
                 "[actors][core]") {
  enter(1);
  receive(1, 1, 0);
  call_remote(2);
  out.take();
  core.receive(response{out.asked.id, {}, user_error("boom")});
  CHECK(out.take() == lines{"failed boom", "resume c1 boom"});
}

TEST_CASE_METHOD(follower_fixture, "a response that nobody waits for counts",
                 "[actors][core]") {
  enter(1);
  core.receive(response{{rank_id{0}, 77}, {}, {}});
  CHECK(core.num_unknown() == 1);
  CHECK(out.take().empty());
}

TEST_CASE_METHOD(follower_fixture, "the session goes on after a failed step",
                 "[actors][core]") {
  enter(1);
  core.fail_step({step_id{1}, user_error("boom")});
  core.end_step({step_id{1}, {}, user_error("boom")});
  enter(2);
  out.take();
  receive(1, 2, 0);
  CHECK(out.take() == lines{"start c1 mb0"});
}

TEST_CASE_METHOD(follower_fixture, "calls that cannot be are refused",
                 "[actors][core]") {
  enter(1);
  receive(1, 1, 0);
  out.take();
  SECTION("a request to the own rank") {
    call_remote(0);
    CHECK(out.last.error.code == error_code::internal);
    CHECK(out.last.error.text == "a request to the own rank");
  }
  SECTION("a grant off pp_rank 0") {
    call_other(call_kind::grant);
    CHECK(out.last.error.text == "only pp_rank 0 may ask for a grant");
  }
  CHECK(core.num_pending() == 0);
}

// -- waits --------------------------------------------------------------------

TEST_CASE_METHOD(follower_fixture, "a wait ends with its completion",
                 "[actors][core]") {
  enter(1);
  receive(1, 1, 0);
  call_other(call_kind::wait);
  CHECK(core.num_pending() == 1);
  out.take();
  SECTION("well") {
    core.complete({out.reported, {}});
    CHECK(out.take() == lines{"resume c1"});
  }
  SECTION("with a failure") {
    core.complete({out.reported, user_error("late")});
    CHECK(out.take() == lines{"failed late", "resume c1 late"});
  }
  SECTION("once") {
    core.fail_step({step_id{1}, user_error("boom")});
    core.complete({out.reported, {}});
    CHECK(out.take() == lines{"failed boom", "resume c1 boom"});
    CHECK(core.num_unknown() == 0);
  }
}

// -- dead ranks ---------------------------------------------------------------

TEST_CASE_METHOD(follower_fixture,
                 "a death ends the step without waiting for any rank",
                 "[actors][core]") {
  enter(1, 1);
  receive(1, 1, 0, phase::forward, 2);
  call_remote(3); // alive, but it may have left the step by now
  receive(2, 1, 0, phase::forward, 2);
  call_remote(2);
  receive(3, 1, 0, phase::forward, 2); // executes
  receive(4, 1, 0, phase::forward, 2); // queued: nobody to answer
  receive(5, 1, 0, phase::forward, 3); // queued
  receive(6, 2, 0, phase::forward, 2); // later
  out.take();
  core.rank_down(death(2, "killed"));
  CHECK(out.take() == lines{"failed killed", "answer 5 killed"});
  CHECK(core.num_later() == 0);
  CHECK(core.num_pending() == 0);
  finish();
  finish(out.last.error);
  CHECK(core.in_step());
  finish(out.last.error);
  CHECK(out.take()
        == lines{"resume c1 killed", "resume c2 killed", "over s1 mb0",
                 "step 1 over killed"});
}

TEST_CASE_METHOD(leader_fixture, "pp_rank 0 reports through its scheduler",
                 "[actors][core]") {
  enter(1, 1);
  receive(1, 1, 0, phase::forward, 0);
  call_remote(1);
  out.take();
  core.rank_down(death(1, "killed"));
  CHECK(out.take() == lines{"failed killed", "resume c1 killed"});
  finish(out.last.error);
  CHECK(out.take() == lines{"answer 1 killed"});
  core.end_step({step_id{1}, {}, death(1, "killed")});
  CHECK(out.take() == lines{"over s1 mb0", "step 1 over killed"});
}

TEST_CASE_METHOD(follower_fixture, "the first of two deaths is the cause",
                 "[actors][core]") {
  enter(1, 1);
  core.rank_down(death(2, "killed"));
  CHECK(out.take()
        == lines{"failed killed", "over s1 mb0", "step 1 over killed"});
  core.rank_down(death(2, "again"));
  core.rank_down(death(1, "next"));
  enter(2, 1);
  CHECK(out.take()
        == lines{"failed killed", "over s2 mb0", "step 2 over killed"});
}

TEST_CASE_METHOD(leader_fixture, "no step runs after a death",
                 "[actors][core]") {
  core.rank_down(death(1, "killed"));
  enter(1, 1);
  CHECK(out.take() == lines{"run 1", "failed killed"});
  receive(1, 1, 0, phase::forward, 0);
  CHECK(out.take() == lines{"answer 1 killed"});
}

TEST_CASE_METHOD(follower_fixture,
                 "an answer that comes after all is not an error",
                 "[actors][core]") {
  enter(1, 1);
  receive(1, 1, 0);
  call_remote(2);
  core.rank_down(death(2, "killed"));
  core.receive(response{out.asked.id, {}, {}});
  CHECK(core.num_unknown() == 1);
}

// -- contexts that die --------------------------------------------------------

TEST_CASE_METHOD(follower_fixture,
                 "a dead context gives back the token and answers",
                 "[actors][core]") {
  enter(1);
  receive(1, 1, 0);
  auto ctx = out.executing;
  out.take();
  core.lose(ctx, "bug");
  CHECK(out.take()
        == lines{"failed a WORKER CONTEXT died: bug",
                 "answer 1 a WORKER CONTEXT died: bug"});
  core.finish(ctx, {}); // its last message
  core.suspend(ctx, {});
  CHECK(out.take().empty());
  CHECK(core.num_contexts() == 0);
  core.end_step({step_id{1}, {}, {}});
  enter(2);
  out.take();
  receive(2, 2, 0);
  CHECK(out.take() == lines{"start c2 mb0"});
}

TEST_CASE_METHOD(follower_fixture, "a context can die while it is pending",
                 "[actors][core]") {
  enter(1);
  receive(1, 1, 0);
  call_remote(2);
  core.lose(out.executing, "bug");
  CHECK(core.num_pending() == 0);
  core.receive(response{out.asked.id, {}, {}});
  CHECK(core.num_unknown() == 1);
}

// -- shutdown -----------------------------------------------------------------

TEST_CASE_METHOD(leader_fixture, "a shutdown cancels what runs",
                 "[actors][core]") {
  enter(1, 1);
  receive(1, 1, 0, phase::forward, 0);
  call_remote(1);
  out.take();
  core.shut_down();
  CHECK(out.take() == lines{"resume c1 the rank shuts down"});
  CHECK(out.last.error.code == error_code::cancelled);
  finish(out.last.error);
  CHECK(out.take()
        == lines{"answer 1 the rank shuts down", "over s1 mb0",
                 "step 1 over the rank shuts down"});
  CHECK(core.num_busy() == 0);
}

TEST_CASE_METHOD(follower_fixture,
                 "for the others a rank that shuts down in a step is lost",
                 "[actors][core][R39]") {
  enter(1);
  receive(1, 1, 0);
  receive(2, 1, 1); // waits for the token
  core.shut_down();
  auto lost = failure{
    error_code::rank_down, rank_id{0}, {}, "the rank shuts down"};
  CHECK(out.answered.id == request_id{rank_id{1}, 2});
  CHECK(out.answered.error == lost);
  finish({error_code::cancelled, rank_id{0}, {}, "the rank shuts down"});
  CHECK(out.answered.id == request_id{rank_id{1}, 1});
  CHECK(out.answered.error == lost);
}

// -- token (R26) --------------------------------------------------------------

TEST_CASE("two ranks of a process take turns", "[actors][core]") {
  auto token = std::make_shared<execution_token>();
  core_fixture a{false, token};
  core_fixture b{false, token};
  for (auto x : {&a, &b}) {
    x->enter(1);
    x->receive(1, 1, 0);
    x->receive(2, 1, 1);
  }
  CHECK(a.out.take() == lines{"start c1 mb0"});
  CHECK(b.out.take().empty());
  a.finish(); // a has more to do, but b waited longer
  CHECK(a.out.take() == lines{"answer 1"});
  CHECK(b.granted == 1);
  b.core.token_granted();
  CHECK(b.out.take() == lines{"start c1 mb0"});
  b.finish();
  CHECK(a.granted == 1);
  a.core.token_granted();
  CHECK(a.out.take() == lines{"start c1 mb1"});
  a.finish();
  CHECK(b.granted == 2);
}

TEST_CASE("a token that comes when nothing is left goes on", "[actors][core]") {
  auto token = std::make_shared<execution_token>();
  core_fixture a{false, token};
  core_fixture b{false, token};
  for (auto x : {&a, &b}) {
    x->enter(1);
    x->receive(1, 1, 0);
  }
  b.core.fail_step({step_id{1}, user_error("boom")}); // empties its queue
  a.finish();
  CHECK(b.granted == 1);
  b.core.token_granted();
  a.out.take();
  a.receive(2, 1, 0);
  CHECK(a.out.take() == lines{"start c1 mb0"});
}

TEST_CASE("a rank that ends gives the token back", "[actors][core]") {
  auto token = std::make_shared<execution_token>();
  core_fixture a{false, token};
  {
    core_fixture b{false, token};
    b.enter(1);
    b.receive(1, 1, 0);
    a.enter(1);
    a.receive(1, 1, 0);
    CHECK(a.out.take().empty());
  }
  CHECK(a.granted == 1);
}
