#include "tests/support/catch.hpp"

#include "actors/order/step_recorder.hpp"
#include "actors/order/step_replay.hpp"
#include "actors/protocol/result_name.hpp"

#include <string>

using namespace smp;

using Catch::Matchers::ContainsSubstring;

namespace {

payload body(const std::string& text, std::vector<int64_t> shape = {2, 3}) {
  auto first = reinterpret_cast<const std::byte*>(text.data());
  payload result{{first, first + text.size()}, {}};
  tensor_ref t;
  t.shape = std::move(shape);
  t.dtype = 6;
  result.tensors.push_back(t);
  return result;
}

request_id id_of(uint64_t step, uint32_t number) {
  return {rank_id{1}, request_number(step_id{step}, number)};
}

request make_request(uint64_t step, uint32_t number) {
  return {
    id_of(step, number), step_id{step}, microbatch_id{number}, module_id{7}, {},
    body("arguments"),   number};
}

call make_call(const std::string& text = "call",
               std::vector<int64_t> shape = {2, 3}) {
  call result;
  result.owner = rank_id{2};
  result.module = module_id{9};
  result.why.what = "'blocks.9', forward";
  result.body = body(text, std::move(shape));
  return result;
}

/// Rank 0 serves two requests of rank 1, each of which calls rank 2. The second
/// one begins while the first one waits.
step_record record() {
  step_recorder x{2};
  x.started(make_request(3, 0));
  x.called(id_of(3, 0), {rank_id{0}, request_number(step_id{3}, 1)},
           make_call());
  x.started(make_request(3, 1));
  x.called(id_of(3, 1), {rank_id{0}, request_number(step_id{3}, 2)},
           make_call());
  x.answered({rank_id{0}, request_number(step_id{3}, 2)}, body("answer"));
  x.resumed(id_of(3, 1));
  x.ended(id_of(3, 1), body("result"));
  x.answered({rank_id{0}, request_number(step_id{3}, 1)}, body("answer"));
  x.resumed(id_of(3, 0));
  x.ended(id_of(3, 0), body("result"));
  return x.take();
}

struct replay_fixture {
  step_replay replay{std::make_shared<const step_record>(record()), step_id{8},
                     true};

  /// Plays the first execution up to its call.
  void begin() {
    replay.started(make_request(8, 0));
  }
};

} // namespace

TEST_CASE_METHOD(replay_fixture, "a replay serves in the recorded order",
                 "[actors][static][R33]") {
  auto a = make_request(8, 0), b = make_request(8, 1);
  CHECK_FALSE(replay.next_is(b));
  REQUIRE(replay.next_is(a));
  replay.started(a);
  CHECK(replay.call(a.id, make_call()).number == 1);
  CHECK_FALSE(replay.may_resume(a.id)); // b came first
  REQUIRE(replay.next_is(b));
  replay.started(b);
  CHECK(replay.call(b.id, make_call()).number == 2);
  CHECK_FALSE(replay.may_resume(a.id));
  REQUIRE(replay.may_resume(b.id));
  replay.resumed(b.id);
  CHECK(replay.end(b.id, body("result")).empty());
  REQUIRE(replay.may_resume(a.id));
  replay.resumed(a.id);
  CHECK(replay.end(a.id, body("result")).empty());
  CHECK_FALSE(replay.next_is(a)); // nothing is left
}

TEST_CASE_METHOD(replay_fixture, "an execution that waits keeps its place",
                 "[actors][static][R33]") {
  begin();
  auto b = make_request(8, 1);
  replay.waits(id_of(8, 0), false);
  CHECK_FALSE(replay.next_is(b));
  replay.woken(id_of(8, 0));
  CHECK(replay.next_is(b));
}

TEST_CASE(
  "who was interrupted in the record may be interrupted again, unless he "
  "waits for peers who follow the same order",
  "[actors][static][R33]") {
  auto same_order = GENERATE(false, true);
  auto for_peers = GENERATE(false, true);
  step_recorder x{2};
  x.started(make_request(3, 0));
  x.waits(id_of(3, 0));
  x.started(make_request(3, 1));
  x.woken(id_of(3, 0));
  step_replay replay{std::make_shared<const step_record>(x.take()), step_id{8},
                     true, same_order};
  replay.started(make_request(8, 0));
  replay.waits(id_of(8, 0), for_peers);
  CHECK(replay.next_is(make_request(8, 1)) == !(same_order && for_peers));
  replay.woken(id_of(8, 0));
  CHECK(replay.next_is(make_request(8, 1)));
}

TEST_CASE_METHOD(replay_fixture, "a divergence says what it diverges from",
                 "[actors][static][R33]") {
  begin();
  auto id = id_of(8, 0);
  auto x = make_call();
  x.module = module_id{10};
  x.why.what = "'blocks.10', forward";
  CHECK(replay.call(id, x).divergence
        == "the record calls 'blocks.9', forward, on rank 2, this step calls "
           "'blocks.10', forward, on rank 2");
  CHECK_THAT(replay.call(id, make_call("other")).divergence,
             ContainsSubstring("what is not a tensor"));
  CHECK_THAT(replay.call(id, make_call("call", {4, 3})).divergence,
             ContainsSubstring("tensor 0 is [4, 3] of element type 6 instead "
                               "of [2, 3] of element type 6"));
  x = make_call();
  x.body.tensors[0].strides = {1, 2};
  CHECK_THAT(replay.call(id, x).divergence,
             ContainsSubstring("tensor 0 is [2, 3] of element type 6 with "
                               "strides [1, 2] instead of [2, 3] of element "
                               "type 6"));
  x = make_call();
  x.body.tensors.clear();
  CHECK_THAT(replay.call(id, x).divergence,
             ContainsSubstring("0 tensors instead of 1"));
  CHECK_THAT(replay.end(id, body("result")),
             ContainsSubstring("this step ends here"));
  CHECK(replay.call(id, make_call()).divergence.empty());
  CHECK_THAT(replay.call(id, make_call()).divergence,
             ContainsSubstring("the record ends here"));
  CHECK_THAT(replay.end(id, body("another")), ContainsSubstring("an answer"));
}

TEST_CASE("strides of axes of one element are not a divergence",
          "[actors][static][R33][R63]") {
  auto x = body("gradient", {4, 1, 3});
  auto& strides = x.tensors[0].strides;
  auto row_major = form_of(x);
  strides = {3, 12, 1};
  CHECK_FALSE(difference(row_major, x));
  strides = {1, 12, 4};
  CHECK(difference(row_major, x));
  auto transposed = form_of(x);
  strides = {1, 1, 4};
  CHECK_FALSE(difference(transposed, x));
  strides = {};
  CHECK(difference(transposed, x));
}

TEST_CASE("an order without forms cares for no arguments",
          "[actors][static][deterministic]") {
  step_replay replay{std::make_shared<const step_record>(record()), step_id{8},
                     false};
  replay.started(make_request(8, 0));
  auto id = id_of(8, 0);
  CHECK(replay.call(id, make_call("other", {4, 3})).divergence.empty());
  CHECK(replay.end(id, body("another")).empty());
}

TEST_CASE("an execution goes on after a promise", "[actors][static][R38]") {
  auto promise = make_call();
  promise.kind = call_kind::promise;
  auto mine = [](uint64_t step, uint32_t number) {
    return request_id{rank_id{0}, promise_number(step_id{step}, number)};
  };
  step_recorder x{1};
  x.started(make_request(3, 0));
  x.called(id_of(3, 0), mine(3, 5), promise);
  x.called(id_of(3, 0), mine(3, 6), promise);
  x.called(id_of(3, 0), {rank_id{0}, request_number(step_id{3}, 1)},
           make_call());
  x.answered(mine(3, 6), body("sizes"));
  x.resumed(id_of(3, 0));
  x.answered(mine(3, 5), body("sizes"));
  x.ended(id_of(3, 0), body("result"));
  auto record = std::make_shared<const step_record>(x.take());
  // Two segments, and numbers of two kinds.
  CHECK(record->order == std::vector<served_segment>{{0, 0}, {0, 1}});
  CHECK(record->last_number == 1);
  CHECK(record->last_promise == 6);
  step_replay replay{record, step_id{8}, false};
  auto a = make_request(8, 0);
  REQUIRE(replay.next_is(a));
  replay.started(a);
  // What goes on is as much of the flow as what is called.
  CHECK(replay.call(a.id, make_call()).divergence
        == "the record calls 'blocks.9', forward, on rank 2, and goes on, "
           "this step calls 'blocks.9', forward, on rank 2");
  auto other = promise;
  other.owner = rank_id{3};
  CHECK_THAT(replay.call(a.id, other).divergence,
             ContainsSubstring("this step calls 'blocks.9', forward, on rank "
                               "3, and goes on"));
  auto first = replay.call(a.id, promise);
  CHECK(first.divergence.empty());
  CHECK(first.number == call_number(mine(8, 5)));
  CHECK_THAT(replay.end(a.id, body("result")),
             ContainsSubstring("this step ends here"));
  CHECK(replay.call(a.id, promise).number == call_number(mine(8, 6)));
  CHECK(replay.call(a.id, make_call()).number == 1);
  REQUIRE(replay.may_resume(a.id));
  replay.resumed(a.id);
  CHECK_THAT(replay.call(a.id, promise).divergence,
             ContainsSubstring("the record ends here"));
  CHECK(replay.end(a.id, body("result")).empty());
}

TEST_CASE_METHOD(replay_fixture, "the record stands for what is not sent",
                 "[actors][static][R33]") {
  auto x = replay.restore(recorded_request{id_of(8, 1), body("").tensors});
  CHECK(x.id == id_of(8, 1));
  CHECK(x.step == step_id{8});
  CHECK(x.microbatch == microbatch_id{1});
  CHECK(x.module == module_id{7});
  CHECK(x.start_number == 1);
  CHECK(x.body.bytes == body("arguments").bytes);
  CHECK(x.body.tensors.size() == 1);
  auto mine = request_id{rank_id{0}, request_number(step_id{8}, 2)};
  auto y = replay.restore(recorded_response{mine, body("").tensors});
  CHECK(y.body.bytes == body("answer").bytes);
  // What the record does not have is a protocol error.
  CHECK_THROWS_AS(replay.restore(recorded_request{id_of(8, 5), {}}), error);
  CHECK_THROWS_AS(replay.restore(recorded_request{id_of(8, 1), {}}), error);
  CHECK_THROWS_AS(replay.restore(recorded_response{mine, {}}), error);
  mine.number += 1;
  CHECK_THROWS_AS(replay.restore(recorded_response{mine, body("").tensors}),
                  error);
}

TEST_CASE("a recorded promise keeps its place and what it needs",
          "[actors][static][R33][R38]") {
  auto needed = [](uint64_t step, size_t position) {
    return result_name(rank_id{2},
                       {rank_id{1}, promise_number(step_id{step}, 4)},
                       step_id{step}, position);
  };
  auto x = make_request(3, 0);
  x.promised = true;
  x.after = promise_number(step_id{3}, 4);
  x.needs = {needed(3, 1)};
  // What is let go is a matter of timing, and not kept.
  x.released = {needed(3, 0)};
  step_recorder recorder{1};
  recorder.started(x);
  recorder.ended(x.id, body("sizes"));
  step_replay replay{std::make_shared<const step_record>(recorder.take()),
                     step_id{8}, true};
  auto y = replay.restore(
    recorded_request{id_of(8, 0), body("").tensors, {needed(8, 2)}});
  CHECK(y.promised);
  CHECK(y.after == promise_number(step_id{8}, 4));
  CHECK(y.needs == std::vector<object_id>{needed(8, 1)});
  CHECK(y.released == std::vector<object_id>{needed(8, 2)});
  y = replay.restore(recorded_request{id_of(8, 0), body("").tensors});
  CHECK(y.released.empty());
}
