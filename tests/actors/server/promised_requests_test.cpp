#include "tests/support/catch.hpp"

#include "actors/protocol/result_name.hpp"
#include "tests/support/actors/scripted_executor.hpp"
#include "tests/support/actors/server_core_fixture.hpp"

// Requests that nobody waits for: who asked goes on, who is asked keeps their
// order and waits for what they need (R38, R39).

using namespace smp;
using namespace smp::test;

namespace {

struct promise_fixture : core_fixture {
  promise_fixture() {
    enter(1);
    out.take();
  }

  using answer_ptr = std::shared_ptr<awaited<response>>;

  /// What executes sends a promise to rank 1.
  answer_ptr promise(uint32_t number) {
    call x;
    x.kind = call_kind::promise;
    x.owner = rank_id{1};
    x.number = promise_number(step_id{1}, number);
    x.answer = std::make_shared<awaited<response>>();
    auto result = x.answer;
    core.issue(out.executing, std::move(x));
    return result;
  }

  void answer(uint32_t number, failure why = {}) {
    core.receive(
      response{{rank_id{0}, promise_number(step_id{1}, number)}, {}, why});
  }

  /// Rank 1 asks something of this rank.
  void receive_promise(uint64_t number, uint64_t after,
                       std::vector<object_id> needs = {}) {
    core.receive(request{{rank_id{1}, number},
                         step_id{1},
                         microbatch_id{0},
                         module_id{7},
                         phase::forward,
                         {},
                         0,
                         true,
                         after,
                         std::move(needs)});
  }
};

const object_id some_object{rank_id{1}, 3, 1};

} // namespace

TEST_CASE_METHOD(promise_fixture,
                 "a context that sends a promise goes on executing",
                 "[actors][core]") {
  receive(1, 1, 0);
  auto x = promise(1);
  auto y = promise(2);
  CHECK(out.take() == lines{"start c1 mb0", "ask r1", "ask r1"});
  CHECK(out.asked.promised);
  CHECK(out.asked.after == promise_number(step_id{1}, 1));
  CHECK(core.num_pending() == 2);
  answer(2);
  CHECK(y->done());
  CHECK_FALSE(x->done());
  answer(1);
  CHECK(x->done());
  CHECK(core.num_pending() == 0);
  CHECK(out.take().empty()); // nobody was woken up
  promise(3);
  // Also if that is over: whether it is depends on timing.
  CHECK(out.asked.after == promise_number(step_id{1}, 2));
}

TEST_CASE_METHOD(promise_fixture,
                 "a call after promises comes after them at its owner",
                 "[actors][core]") {
  receive(1, 1, 0);
  promise(1);
  call_remote(1);
  CHECK(out.asked.after == promise_number(step_id{1}, 1));
  CHECK_FALSE(out.asked.promised);
}

TEST_CASE_METHOD(promise_fixture,
                 "a failed promise ends the step and fails its answer",
                 "[actors][core]") {
  receive(1, 1, 0);
  auto x = promise(1);
  out.take();
  answer(1, user_error("boom"));
  CHECK(x->cause() == user_error("boom"));
  CHECK(out.take() == lines{"failed boom"});
  // What the context sends from now on fails at once.
  CHECK(promise(2)->cause() == user_error("boom"));
}

TEST_CASE_METHOD(promise_fixture,
                 "the end of a step and the death of a rank fail promises",
                 "[actors][core]") {
  receive(1, 1, 0);
  auto x = promise(1);
  core.rank_down(death(1, "gone"));
  CHECK(x->cause() == death(1, "gone"));
  CHECK(core.num_pending() == 0);
}

TEST_CASE_METHOD(promise_fixture,
                 "requests of one execution start in their order",
                 "[actors][core]") {
  receive_promise(12, 11);
  receive_promise(13, 12);
  CHECK(core.num_blocked() == 2);
  CHECK(out.take().empty());
  receive_promise(11, 0);
  CHECK(out.take() == lines{"start c1 mb0"});
  finish();
  CHECK(out.take() == lines{"answer 11", "start c1 mb0"});
  finish();
  CHECK(core.num_blocked() == 0);
  finish();
  CHECK(out.take() == lines{"answer 12", "start c1 mb0", "answer 13"});
  // One that comes late finds the one before it over.
  receive_promise(14, 13);
  CHECK(out.take() == lines{"start c1 mb0"});
}

TEST_CASE_METHOD(promise_fixture,
                 "a request whose objects are missing takes neither context "
                 "nor token",
                 "[actors][core]") {
  receive_promise(11, 0, {some_object});
  CHECK(out.take() == lines{"gather 11"});
  CHECK(core.num_contexts() == 0);
  receive(1, 1, 1);
  CHECK(out.take() == lines{"start c1 mb1"});
  finish();
  out.take();
  core.complete({request_id{rank_id{1}, 11}, {}});
  CHECK(out.take() == lines{"start c1 mb0"});
}

TEST_CASE_METHOD(promise_fixture,
                 "a request whose objects cannot come fails with their cause",
                 "[actors][core]") {
  receive_promise(11, 0, {some_object});
  receive_promise(12, 11);
  out.take();
  core.complete({request_id{rank_id{1}, 11}, user_error("no object")});
  CHECK(
    out.take()
    == lines{"failed no object", "answer 12 no object", "answer 11 no object"});
  CHECK(core.num_blocked() == 0);
}

// -- replayed steps -----------------------------------------------------------

namespace {

/// Rank 0 serves a request of rank 1, which sends a promise, in every step.
struct replay_fixture : replaying_core {
  replay_fixture() {
    records->set_key(0);
  }

  using answer_ptr = std::shared_ptr<awaited<response>>;

  answer_ptr promise(uint64_t step, std::string text = "args",
                     rank_id owner = rank_id{1}) {
    call x;
    x.kind = call_kind::promise;
    x.owner = owner;
    x.number = promise_number(step_id{step}, 4);
    x.body = text_payload(text);
    x.plan = std::make_shared<call_plan>();
    x.released = {result_name(rank_id{1}, {rank_id{0}, 2}, step_id{step}, 0)};
    x.answer = std::make_shared<awaited<response>>();
    auto result = x.answer;
    core.issue(out.executing, std::move(x));
    return result;
  }

  /// Enters the step and begins the request.
  void begin(uint64_t step) {
    core.enter({step_id{step}, 1});
    request x;
    x.id = {rank_id{1}, request_number(step_id{step}, 1)};
    x.step = step_id{step};
    core.receive(std::move(x));
    out.take();
  }

  void end(uint64_t step) {
    core.finish(out.executing, {text_payload("result"), {}});
    end_step(step);
  }

  request_id promised(uint64_t step) const {
    return {rank_id{0}, promise_number(step_id{step}, 4)};
  }

  /// Records step 1.
  void record() {
    begin(1);
    promise(1);
    core.receive(response{promised(1), text_payload("sizes"), {}});
    end(1);
    begin(2);
  }
};

} // namespace

TEST_CASE_METHOD(replay_fixture,
                 "a replayed promise knows what its caller went on with",
                 "[actors][core][static][R33][R38]") {
  record();
  auto known = records->sent({rank_id{1}, request_number(step_id{2}, 1)}, 0);
  REQUIRE(known);
  CHECK(known->plan);
  auto x = promise(2, "others"); // arguments are free
  CHECK(out.take() == lines{"ask r1"});
  CHECK(out.asked.id == promised(2));
  CHECK(text_of(out.asked.body) == "others");
  CHECK(out.asked.released.size() == 1);
  core.receive(response{promised(2), text_payload("sizes"), {}});
  REQUIRE(x->done());
  CHECK(text_of(awaited<response>::peek(x, {}).body) == "sizes");
  CHECK(core.num_pending() == 0);
}

TEST_CASE_METHOD(replay_fixture, "a promise to another rank leaves the record",
                 "[actors][core][static][R33][R38]") {
  record();
  auto x = promise(2, "args", rank_id{2});
  auto told = out.take();
  REQUIRE(told.size() == 2);
  CHECK_THAT(told[0], Catch::Matchers::ContainsSubstring("on rank 2"));
  CHECK(told[1] == "ask r2");
  core.receive(response{promised(2), text_payload("sizes"), {}});
  CHECK(text_of(awaited<response>::peek(x, {}).body) == "sizes");
}
