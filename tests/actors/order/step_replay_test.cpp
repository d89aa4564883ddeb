#include "tests/support/catch.hpp"

#include "actors/order/step_recorder.hpp"
#include "actors/order/step_replay.hpp"
#include "actors/protocol/result_name.hpp"

#include <string>

using namespace smp;

using Catch::Matchers::ContainsSubstring;

namespace {

request_id id_of(uint64_t step, uint32_t number) {
  return {rank_id{1}, request_number(step_id{step}, number)};
}

request make_request(uint64_t step, uint32_t number) {
  return {id_of(step, number),
          step_id{step},
          microbatch_id{number},
          module_id{7},
          {},
          {},
          number};
}

call make_call() {
  call result;
  result.owner = rank_id{2};
  result.module = module_id{9};
  result.why.what = "'blocks.9', forward";
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
  x.resumed(id_of(3, 1));
  x.resumed(id_of(3, 0));
  return x.take();
}

struct replay_fixture {
  step_replay replay{std::make_shared<const step_record>(record())};

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
  CHECK(replay.end(b.id).empty());
  REQUIRE(replay.may_resume(a.id));
  replay.resumed(a.id);
  CHECK(replay.end(a.id).empty());
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
  step_replay replay{std::make_shared<const step_record>(x.take()), same_order};
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
  CHECK_THAT(replay.end(id), ContainsSubstring("this step ends here"));
  CHECK(replay.call(id, make_call()).divergence.empty());
  CHECK_THAT(replay.call(id, make_call()).divergence,
             ContainsSubstring("the record ends here"));
  CHECK(replay.end(id).empty());
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
  x.resumed(id_of(3, 0));
  auto record = std::make_shared<const step_record>(x.take());
  // Two segments, and numbers of two kinds.
  CHECK(record->order == std::vector<served_segment>{{0, 0}, {0, 1}});
  CHECK(record->last_number == 1);
  CHECK(record->last_promise == 6);
  step_replay replay{record};
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
  CHECK_THAT(replay.end(a.id), ContainsSubstring("this step ends here"));
  CHECK(replay.call(a.id, promise).number == call_number(mine(8, 6)));
  CHECK(replay.call(a.id, make_call()).number == 1);
  REQUIRE(replay.may_resume(a.id));
  replay.resumed(a.id);
  CHECK_THAT(replay.call(a.id, promise).divergence,
             ContainsSubstring("the record ends here"));
  CHECK(replay.end(a.id).empty());
}
