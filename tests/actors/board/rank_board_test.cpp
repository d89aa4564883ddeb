#include "tests/support/catch.hpp"

#include "actors/board/rank_board.hpp"

#include <chrono>
#include <memory>
#include <string>
#include <utility>

using namespace smp;

namespace {

constexpr context_id ctx{1};

struct board_fixture {
  board_fixture() {
    board->name_modules(
      [](module_id x) { return "m" + std::to_string(x.value); });
    board->add(ctx, [this] { return does; });
  }

  /// The context begins to serve a request.
  void start() {
    does.state = context_state::executing;
    does.current.id = {rank_id{1}, 6};
    does.current.microbatch = microbatch_id{2};
    does.current.module = module_id{3};
  }

  void park(context_view::awaited_call x) {
    does.state = context_state::pending;
    does.waits_for = std::move(x);
  }

  void call_m4() {
    context_view::awaited_call x;
    x.owner = rank_id{1};
    x.module = module_id{4};
    park(std::move(x));
  }

  /// @returns the activities beside the user's thread.
  std::vector<activity> contexts() {
    auto result = board->view().activities;
    result.erase(result.begin());
    return result;
  }

  context_view does;
  std::shared_ptr<rank_board> board = std::make_shared<rank_board>(rank_id{0},
                                                                   2);
};

} // namespace

TEST_CASE_METHOD(board_fixture,
                 "a board tells who executes and what others wait for",
                 "[actors][board]") {
  CHECK(contexts().empty());
  board->executes(ctx);
  REQUIRE(contexts().size() == 1);
  CHECK(contexts()[0].executes); // the token is given, the message on its way
  start();
  auto x = contexts().at(0);
  CHECK(x.executes);
  CHECK(x.what == "module m3, microbatch 2, forward");
  CHECK(x.serves == request_id{rank_id{1}, 6});
  call_m4();
  CHECK(contexts().at(0).executes); // the token is not back yet
  board->parked(ctx, {rank_id{0}, 9});
  x = contexts().at(0);
  CHECK_FALSE(x.executes);
  CHECK(x.waits_for == "module m4, microbatch 2, forward");
  CHECK(x.from == rank_id{1});
  CHECK(x.asks == request_id{rank_id{0}, 9});
  board->answered(ctx);
  CHECK(contexts().at(0).waits_for == "the execution token");
  board->executes(ctx);
  CHECK(contexts().at(0).executes);
  does.state = context_state::idle;
  board->idle(ctx);
  CHECK(contexts().empty());
}

TEST_CASE_METHOD(board_fixture,
                 "a board tells whose answer is missing to who went on",
                 "[actors][board]") {
  board->executes(ctx);
  start();
  context_view::awaited_call x;
  x.kind = call_kind::wait;
  x.what = phase::backward;
  x.done = std::make_shared<completion>();
  auto first = std::make_shared<completion>();
  auto of_m4 = answer_of("m4", phase::forward, rank_id{1});
  of_m4.asks = 9;
  auto of_m5 = answer_of("m5", phase::backward, rank_id{1});
  of_m5.asks = 10;
  x.why = reason_of_all({{first, of_m4}, {x.done, of_m5}});
  park(x);
  board->parked(ctx, {});
  auto y = contexts().at(0);
  CHECK(y.waits_for == "module m4, microbatch 2, forward");
  CHECK(y.awaits == "m4");
  CHECK(y.subject.what == wait_subject::kind::module);
  CHECK(y.from == rank_id{1});
  CHECK(y.asks == request_id{rank_id{0}, 9});
  first->set();
  y = contexts().at(0);
  CHECK(y.waits_for == "module m5, microbatch 2, backward");
  CHECK(y.asks == request_id{rank_id{0}, 10});
}

TEST_CASE_METHOD(board_fixture,
                 "what executes tells that no thread gets Python's lock",
                 "[actors][board]") {
  static double asked_for = 0;
  release_in_waits({.ask = [] { return asked_for; }});
  start();
  board->executes(ctx);
  CHECK(contexts().at(0).what == "module m3, microbatch 2, forward");
  asked_for = 5;
  auto told = " (no thread can take Python's lock for 5 s)";
  CHECK(contexts().at(0).what
        == std::string{"module m3, microbatch 2, forward"} + told);
  CHECK(board->view().activities.at(0).what
        == std::string{"user code outside of a step"} + told);
  call_m4();
  board->parked(ctx, {rank_id{0}, 9});
  CHECK(contexts().at(0).what == "module m3, microbatch 2, forward");
  release_in_waits({});
}

TEST_CASE_METHOD(board_fixture, "the lock is asked for while nothing happens",
                 "[actors][board]") {
  static int questions = 0;
  release_in_waits({.ask = [] { return 0.0 * ++questions; }});
  board->look();
  board->note();
  board->look();
  CHECK(questions <= 1);
  board->look();
  CHECK(questions == 2);
  release_in_waits({});
}

TEST_CASE_METHOD(board_fixture, "nothing remains of a context that died",
                 "[actors][board]") {
  board->executes(ctx);
  start();
  board->lost(ctx);
  CHECK(contexts().empty());
}

TEST_CASE_METHOD(board_fixture,
                 "the time in which somebody executes is counted",
                 "[actors][board]") {
  // A thread that waits in the middle of a step for one that does nothing.
  auto forever = std::make_shared<completion>();
  board->main_waits(forever, end_of_step(step_id{1}, rank_id{0}));
  auto main = board->view().activities.at(0);
  CHECK(main.waits_for == "the end of step 1");
  CHECK(main.subject.what == wait_subject::kind::step_end);
  auto begin = board->look_at_usage();
  CHECK_FALSE(begin.bubble);
  auto past = [&](double x) { return begin.up + x; };
  auto await = [&](double until) {
    while (board->look_at_usage().up < until) {
      // time passes
    }
  };
  await(past(0.02));
  auto idle = board->look_at_usage();
  CHECK(idle.busy == begin.busy);
  board->executes(ctx);
  auto started = board->look_at_usage();
  await(started.up + 0.02);
  auto busy = board->look_at_usage();
  CHECK(busy.busy - started.busy == Catch::Approx(busy.up - started.up));
  board->parked(ctx, {});
  auto parked = board->look_at_usage();
  await(parked.up + 0.01);
  CHECK(board->look_at_usage().busy == parked.busy);
  board->main_executes();
  board->step_ended(0.25);
  await(parked.up + 0.02);
  auto end = board->look_at_usage();
  CHECK(end.busy > parked.busy);
  CHECK(end.busy <= end.up);
  CHECK(end.bubble == 0.25);
}

TEST_CASE_METHOD(board_fixture, "activities are told in brief, too",
                 "[actors][board]") {
  start();
  board->executes(ctx);
  CHECK(contexts().at(0).brief == "FWD mb2 m3");
  call_m4();
  board->parked(ctx, {rank_id{0}, 9});
  CHECK(contexts().at(0).awaits == "m4");
  CHECK(board->view().activities.at(0).brief == "user code");
}

TEST_CASE_METHOD(board_fixture, "that a step ends is told until it is over",
                 "[actors][board][R31]") {
  auto ends_step = [&] { return board->view().activities.at(0).ends_step; };
  CHECK_FALSE(ends_step());
  board->main_ends_step(true);
  board->main_waits(std::make_shared<completion>(), {"any text", {}});
  CHECK(ends_step());
  board->main_executes();
  board->main_ends_step(false);
  CHECK_FALSE(ends_step());
}
