#include "tests/support/catch.hpp"

#include "actors/board/noting_output.hpp"
#include "actors/board/rank_board.hpp"
#include "tests/support/server_core_fixture.hpp"

using namespace smp;
using namespace smp::test;

namespace {

constexpr context_id ctx{1};

/// Looks at the board when it is told to start or to resume.
struct looking_output : noted_output {
  void start(context_id x, request what) override {
    noted_output::start(x, std::move(what));
    seen = board.view().activities.back().executes;
  }

  void resume(context_id x, response what) override {
    noted_output::resume(x, std::move(what));
    seen = board.view().activities.back().executes;
  }

  rank_board board{rank_id{0}, 2};
  bool seen = false;
};

struct noting_fixture {
  /// @returns whether what `f` does counts as progress of the rank
  template <class F>
  bool counts(F f) {
    inner.board.look();
    auto before = inner.board.look();
    f();
    return inner.board.look() != before;
  }

  looking_output inner;
  noting_output out{inner, inner.board};
};

} // namespace

TEST_CASE_METHOD(noting_fixture,
                 "the board knows who has the token before a context does",
                 "[actors][board]") {
  request first;
  first.id = {rank_id{1}, 6};
  first.microbatch = microbatch_id{2};
  auto notes = inner.board.notes_of(ctx);
  auto now = context_notes::clock::now();
  out.start(ctx, first);
  CHECK(inner.seen);
  REQUIRE(notes->start(first, now));
  call x;
  x.owner = rank_id{1};
  REQUIRE(notes->park(x, now));
  out.parked(ctx, {rank_id{0}, 3});
  auto waits = inner.board.view().activities.back();
  CHECK_FALSE(waits.executes);
  CHECK(waits.asks == request_id{rank_id{0}, 3});
  out.answered(ctx);
  CHECK(inner.board.view().activities.back().waits_for
        == "the execution token");
  inner.seen = false;
  out.resume(ctx, {});
  CHECK(inner.seen);
  REQUIRE(notes->resume(now));
  REQUIRE(notes->finish(now));
  out.idle(ctx);
  CHECK(inner.board.view().activities.size() == 1); // the user's thread
  CHECK(inner.take() == lines{"start c1 mb2", "resume c1"});
}

TEST_CASE_METHOD(noting_fixture, "whatever goes to others counts as progress",
                 "[actors][board]") {
  CHECK(counts([&] { out.ask(rank_id{1}, request{}); }));
  CHECK(counts([&] { out.ask(rank_id{1}, recorded_request{}); }));
  CHECK(counts([&] { out.answer(response{}); }));
  CHECK(counts([&] { out.answer(recorded_response{}); }));
  CHECK(counts([&] { out.forward_done({}); }));
  CHECK(counts([&] { out.run({}); }));
  CHECK(counts([&] { out.planned({}); }));
  CHECK(counts([&] { out.diverged({}); }));
  CHECK(counts([&] { out.failed({}); }));
  CHECK(counts([&] { out.step_over({}); }));
  CHECK(inner.take().size() == 10);
  // What only waits does not.
  CHECK_FALSE(counts([&] { out.report_done({}, nullptr); }));
  CHECK_FALSE(counts([&] { CHECK_FALSE(out.gather({})); }));
  CHECK(inner.take() == lines{"report_done", "gather 0"});
}
