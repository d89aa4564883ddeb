#include "tests/support/catch.hpp"

#include "actors/schedule/schedule_dialog.hpp"
#include "tests/support/error_of.hpp"

#include <string>
#include <utility>
#include <vector>

using namespace smp;
using namespace smp::test;

using Catch::Matchers::ContainsSubstring;

namespace {

using lines = std::vector<std::string>;

struct dialog_fixture : schedule_asker {
  void ask(uint64_t number, const schedule_event& x) override {
    last = number;
    asked.push_back(to_string(x));
  }

  void answer(const schedule_answer& x) {
    dialog.answered(last, x);
  }

  /// Answers every question with "wait" but the first one.
  void start(uint64_t x) {
    answer(start_forward(microbatch_id{x}));
    answer(wait_for_event());
  }

  lines take() {
    return std::exchange(asked, {});
  }

  std::string error_text() {
    auto x = failure_of([this] {
      while (dialog.next()) {
        // nop
      }
    });
    code = x.code;
    return x.text;
  }

  uint64_t last = 0;
  lines asked;
  error_code code = error_code::none;
  schedule_dialog dialog{"mine", step_begins{step_id{4}, 3, 2, 2}, *this};
};

} // namespace

TEST_CASE_METHOD(dialog_fixture, "an actor is asked one question at a time",
                 "[actors][schedule]") {
  CHECK(take() == lines{"step 4 begins"});
  CHECK(dialog.deciding());
  CHECK_FALSE(dialog.next());
  answer(start_forward(microbatch_id{1}));
  CHECK(dialog.next() == task{microbatch_id{1}, phase::forward});
  CHECK_FALSE(dialog.next());
  CHECK(take() == lines{"[1, \"forward\"] started"});
  // What happens meanwhile waits.
  dialog.forward_done(microbatch_id{1});
  CHECK(take().empty());
  REQUIRE(dialog.question());
  CHECK(to_string(*dialog.question()) == "[1, \"forward\"] started");
  answer(wait_for_event());
  CHECK(take() == lines{"forward ended, microbatch 1"});
  answer(wait_for_event());
  CHECK(take() == lines{"backward ready, microbatch 1"});
  answer(start_backward(microbatch_id{1}));
  CHECK(dialog.next() == task{microbatch_id{1}, phase::backward});
  answer(wait_for_event());
  CHECK_FALSE(dialog.deciding());
}

TEST_CASE_METHOD(dialog_fixture, "a body without backward just ends",
                 "[actors][schedule]") {
  start(0);
  take();
  dialog.ended(microbatch_id{0});
  answer(wait_for_event());
  CHECK(
    take()
    == lines{"forward ended, microbatch 0", "backward ended, microbatch 0"});
}

TEST_CASE_METHOD(dialog_fixture, "only the last of a rank's levels is kept",
                 "[actors][schedule]") {
  take();
  for (uint64_t bytes : {100, 200, 300})
    dialog.rank_changed({1, true, bytes});
  dialog.rank_changed({0, true, 5});
  answer(start_forward(microbatch_id{0}));
  for (int i = 0; i < 5; ++i)
    answer(wait_for_event());
  CHECK(take()
        == lines{"rank 1 keeps 300 bytes", "rank 1 is busy",
                 "rank 0 keeps 5 bytes", "rank 0 is busy",
                 "[0, \"forward\"] started"});
  // What did not change is not told again.
  dialog.rank_changed({1, true, 300});
  CHECK(take().empty());
  dialog.rank_changed({1, false, 300});
  CHECK(take() == lines{"rank 1 is idle"});
}

TEST_CASE_METHOD(dialog_fixture, "nonsense is refused with actor and event",
                 "[actors][schedule][R34]") {
  SECTION("a microbatch that does not exist") {
    answer(start_forward(microbatch_id{3}));
    CHECK(error_text()
          == "schedule actor \"mine\" answers [3, \"forward\"] in a step of 3 "
             "microbatches (event: step 4 begins)");
    CHECK(code == error_code::schedule);
  }
  SECTION("a phase that does not exist") {
    answer({task{microbatch_id{0}, static_cast<phase>(7)}});
    CHECK_THAT(error_text(), ContainsSubstring("a phase that does not exist"));
  }
  SECTION("a forward phase twice") {
    answer(start_forward(microbatch_id{0}));
    answer(start_forward(microbatch_id{0}));
    CHECK(error_text()
          == "schedule actor \"mine\" answers [0, \"forward\"] a second time "
             "(event: [0, \"forward\"] started)");
  }
  SECTION("a backward phase twice") {
    start(0);
    dialog.forward_done(microbatch_id{0});
    answer(wait_for_event());
    answer(start_backward(microbatch_id{0}));
    answer(start_backward(microbatch_id{0}));
    CHECK_THAT(error_text(), ContainsSubstring("a second time"));
  }
  SECTION("a backward phase too early") {
    start(0);
    dialog.rank_changed({0, true, 0});
    answer(start_backward(microbatch_id{0}));
    CHECK_THAT(error_text(), ContainsSubstring("not ready"));
    CHECK_THAT(error_text(), ContainsSubstring("event: rank 0 is busy"));
  }
  SECTION("more microbatches than may be alive") {
    answer(start_forward(microbatch_id{0}));
    answer(start_forward(microbatch_id{1}));
    answer(start_forward(microbatch_id{2}));
    CHECK_THAT(error_text(), ContainsSubstring("smp.active_microbatches = 2"));
  }
  CHECK(dialog.broken());
  CHECK_FALSE(dialog.deciding());
}

TEST_CASE_METHOD(dialog_fixture, "waiting for nothing is refused at once",
                 "[actors][schedule][R34]") {
  SECTION("at the begin") {
    answer(wait_for_event());
    CHECK(error_text()
          == "schedule actor \"mine\" waits although nothing is in flight "
             "(event: step 4 begins)");
  }
  SECTION("in the middle") {
    start(0);
    dialog.forward_done(microbatch_id{0});
    answer(wait_for_event()); // the next event is in line already
    CHECK(error_text().empty());
    answer(wait_for_event());
    CHECK_THAT(error_text(), ContainsSubstring("backward ready"));
  }
  SECTION("before the last microbatch") {
    for (uint64_t x : {0, 1}) {
      start(x);
      dialog.ended(microbatch_id{x});
      answer(wait_for_event());
    }
    answer(wait_for_event());
    CHECK_THAT(error_text(), ContainsSubstring("backward ended, microbatch 1"));
  }
  CHECK(code == error_code::stalled);
}

TEST_CASE_METHOD(dialog_fixture, "at the end of a step waiting is right",
                 "[actors][schedule]") {
  for (uint64_t x : {0, 1, 2}) {
    answer(start_forward(microbatch_id{x}));
    answer(wait_for_event());
    dialog.ended(microbatch_id{x});
    answer(wait_for_event());
    if (x < 2)
      continue;
    answer(wait_for_event());
  }
  CHECK(error_text().empty());
}

TEST_CASE_METHOD(dialog_fixture, "a missing answer is refused, a late one not",
                 "[actors][schedule][R34]") {
  auto first = last;
  answer(start_forward(microbatch_id{0}));
  dialog.failed(first, error_code::stalled, "did not answer"); // answered
  dialog.answered(first, start_forward(microbatch_id{1}));     // the same
  CHECK(dialog.next() == task{microbatch_id{0}, phase::forward});
  CHECK_FALSE(dialog.next());
  dialog.failed(last, error_code::stalled, "did not answer within 5 s");
  CHECK(error_text()
        == "schedule actor \"mine\" did not answer within 5 s (event: [0, "
           "\"forward\"] started)");
  CHECK(code == error_code::stalled);
}
