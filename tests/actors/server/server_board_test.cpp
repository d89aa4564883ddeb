#include "tests/support/catch.hpp"

#include "actors/server/executor.hpp"
#include "tests/support/actors/server_core_fixture.hpp"

// What the core writes on the board of its rank, for the stall search.

using namespace smp;
using namespace smp::test;

namespace {

constexpr context_id ctx{1};

/// The test does what its code would do.
struct played_executor : executor {
  using executor::finish;
  using executor::leave;

  void wake() override {
    // nop
  }
};

struct board_fixture : leader_fixture {
  board_fixture() {
    out.board.add(ctx, [this] { return code.look(); });
  }

  /// What the first context does, after what the user's thread does.
  activity first_context() {
    return out.board.view().activities.at(1);
  }

  /// @returns whether what `f` does counts as progress of the rank
  template <class F>
  bool counts(F f) {
    out.board.look();
    auto before = out.board.look();
    f();
    return out.board.look() != before;
  }

  played_executor code;
};

} // namespace

TEST_CASE_METHOD(board_fixture,
                 "the board knows who has the token before a context does",
                 "[actors][core][board]") {
  enter(1);
  request first{{rank_id{1}, 6}, step_id{1},     microbatch_id{0},
                module_id{7},    phase::forward, {}};
  core.receive(first);
  CHECK(out.had_token);
  REQUIRE_FALSE(code.start(first));
  call x;
  x.owner = rank_id{1};
  code.leave(x);
  core.suspend(ctx, x);
  CHECK_FALSE(first_context().executes);
  CHECK(first_context().asks == out.asked.id);
  auto asked = out.asked.id;
  receive(7, 1, 1); // takes the token
  core.receive(response{asked, {}, {}});
  CHECK(first_context().waits_for == "the execution token");
  out.had_token = false;
  core.finish(context_id{2}, {});
  CHECK(out.had_token);
  REQUIRE_FALSE(code.resume({}));
  code.finish({});
  core.finish(ctx, {});
  CHECK(out.board.view().activities.size() == 1); // the user's thread
}

TEST_CASE_METHOD(board_fixture, "whatever goes to others counts as progress",
                 "[actors][core][board]") {
  CHECK(counts([&] { enter(1); }));               // runs
  CHECK_FALSE(counts([&] { receive(2, 3, 0); })); // of a later step
  receive(1, 1, 0);
  CHECK(counts([&] { call_remote(1); })); // asks
  core.receive(response{out.asked.id, {}, {}});
  CHECK(counts([&] { finish(); })); // answers
}
