#include "tests/support/catch.hpp"

#include "actors/order/order_book.hpp"

#include <array>
#include <vector>

using namespace smp;

namespace {

/// A record that can be told from others.
step_record record_of(uint64_t microbatches) {
  step_record result;
  result.microbatches = microbatches;
  return result;
}

struct book_fixture {
  /// Plays step `n` of `key` on pp_rank 0.
  step_plan play(uint64_t n, uint64_t key, double seconds, size_t warm_up = 0) {
    book.set_key(key);
    auto plan = book.plan(step_id{n});
    auto replayed = book.begin(plan);
    if (!replayed)
      book.recorded(plan, record_of(n));
    else
      source = replayed->microbatches;
    book.end();
    book.took(step_id{n}, seconds, false, warm_up);
    return plan;
  }

  order_book book{{.static_mode = true, .steps = 3}};
  uint64_t source = 0; // the step that was replayed last
};

using mode = step_plan::mode;

} // namespace

TEST_CASE_METHOD(book_fixture, "the fastest of the first steps is replayed",
                 "[actors][static][R33]") {
  CHECK(play(1, 0, 3).what == mode::record);
  CHECK(play(2, 0, 1).what == mode::record);
  CHECK(play(3, 0, 2).what == mode::record);
  auto plan = play(4, 0, 0.5);
  CHECK(plan.what == mode::replay);
  CHECK(plan.source == step_id{2});
  CHECK(source == 2);
  CHECK(play(5, 0, 9).source == step_id{2});
  CHECK_FALSE(book.find(0, step_id{1}));
  CHECK(book.find(0, step_id{2}));
}

TEST_CASE_METHOD(book_fixture, "first steps that go otherwise do not count",
                 "[actors][static][R33]") {
  for (auto key : {0u, 1u}) {
    auto step = [key](uint64_t n) { return 10 * key + n; };
    for (uint64_t n = 1; n <= 5; ++n) {
      CHECK(play(step(n), key, n == 1 ? 0.1 : 1.0 / n, 2).what == mode::record);
    }
    CHECK(play(step(6), key, 1, 2).source == step_id{step(5)});
  }
}

TEST_CASE_METHOD(book_fixture, "each key counts its own steps",
                 "[actors][static][R33]") {
  for (uint64_t n = 1; n <= 3; ++n)
    play(n, 5, 1);
  CHECK(play(4, 6, 1).what == mode::record);
  CHECK(play(5, 5, 1).what == mode::replay);
  CHECK(play(6, 6, 1).what == mode::record);
  CHECK(play(7, 6, 1).what == mode::record);
  CHECK(play(8, 6, 1).what == mode::replay);
}

TEST_CASE_METHOD(book_fixture, "a step without a record does not count",
                 "[actors][static][R33]") {
  for (uint64_t n = 1; n <= 5; ++n) {
    book.begin(book.plan(step_id{n})); // fails
    book.end();
    book.took(step_id{n}, 0.1);
  }
  CHECK(book.plan(step_id{6}).what == mode::record);
}

TEST_CASE_METHOD(book_fixture, "keys that nobody uses are forgotten",
                 "[actors][static]") {
  for (uint64_t n = 1; n <= 3; ++n)
    play(n, 0, 1);
  for (uint64_t n = 4; n <= 20; ++n)
    play(n, n, 1);
  CHECK_FALSE(book.find(0, step_id{1}));
  CHECK(play(21, 0, 1).what == mode::record);
}

TEST_CASE_METHOD(book_fixture, "a record that is not there is an error",
                 "[actors][static]") {
  CHECK_THROWS_AS(book.begin({step_id{4}, mode::replay, 0, step_id{2}}), error);
}

TEST_CASE_METHOD(book_fixture, "executions see what the record knows of them",
                 "[actors][static]") {
  step_record x;
  auto& y = x.executions.emplace_back();
  y.id = {rank_id{1}, 4};
  for (auto kind : {call_kind::remote, call_kind::grant, call_kind::remote}) {
    y.calls.push_back({kind,
                       static_cast<uint32_t>(y.calls.size()),
                       {},
                       {},
                       phase::forward,
                       {},
                       {},
                       {}});
  }
  x.by_id.emplace(y.id, 0);
  book.choose(0, step_id{1}, std::move(x), 0);
  // Of step 9: only the number of the request counts.
  auto id = request_id{rank_id{1}, uint64_t{9} << 32 | 4};
  CHECK_FALSE(book.sent(id, 0));
  book.begin({step_id{9}, mode::replay, 0, step_id{1}});
  CHECK(book.replaying());
  CHECK(book.sent(id, 0)->number == 0);
  CHECK(book.sent(id, 1)->number == 2); // grants are not requests
  CHECK_FALSE(book.sent(id, 2));
  CHECK_FALSE(book.sent({rank_id{2}, 4}, 0));
  book.diverged("somehow");
  CHECK_FALSE(book.replaying());
  CHECK_FALSE(book.sent(id, 0));
  CHECK(book.note().divergence == "somehow");
}

TEST_CASE_METHOD(book_fixture, "steps that learn are recorded in vain",
                 "[actors][static][R38]") {
  book.set_key(0);
  auto step = [&](uint64_t n, double seconds, bool learnt) {
    auto plan = book.plan(step_id{n});
    if (!book.begin(plan))
      book.recorded(plan, record_of(n));
    book.end();
    book.took(step_id{n}, seconds, learnt);
    return plan;
  };
  SECTION("a few of them") {
    for (uint64_t n = 1; n <= 5; ++n)
      CHECK(step(n, static_cast<double>(n), n <= 2).what == mode::record);
    CHECK(step(6, 1, false).source == step_id{3});
  }
  SECTION("a model that always learns gets a record in the end") {
    for (uint64_t n = 1; n <= 6; ++n)
      CHECK(step(n, 1, true).what == mode::record);
    CHECK(step(7, 1, true).what == mode::replay);
  }
}

TEST_CASE_METHOD(book_fixture, "outdated records are recorded again",
                 "[actors][static][R19]") {
  play(1, 5, 1);
  book.outdate();
  CHECK(book.recorded_steps(5) == 1);
  CHECK_FALSE(book.find(5, step_id{1}));
  for (uint64_t n = 2; n <= 4; ++n)
    CHECK(play(n, 5, 1).what == mode::record);
  CHECK(play(5, 5, 1).what == mode::replay);
  play(6, 6, 1);
  book.outdate();
  // What is replayed is forgotten as well.
  CHECK(play(7, 5, 1).what == mode::record);
  CHECK(book.recorded_steps(5) == 5);
  CHECK(book.recorded_steps(7) == 0);
}

TEST_CASE("promises have the numbers of the record or new ones",
          "[actors][static][R38]") {
  order_book book{{.static_mode = true}};
  step_record x;
  auto& y = x.executions.emplace_back();
  y.id = {rank_id{1}, 4};
  uint32_t number = 6;
  for (auto kind : {call_kind::promise, call_kind::grant, call_kind::remote})
    y.calls.push_back({kind, number++, {}, {}, phase::backward, {}, {}, {}});
  x.by_id.emplace(y.id, 0);
  x.last_promise = 9;
  book.choose(0, step_id{1}, std::move(x), 0);
  auto id = request_id{rank_id{1}, uint64_t{9} << 32 | 4};
  CHECK_FALSE(book.sent(id, 0));
  CHECK(book.last_promise() == 0);
  book.begin({step_id{9}, mode::replay, 0, step_id{1}});
  REQUIRE(book.sent(id, 0));
  CHECK(book.sent(id, 0)->kind == call_kind::promise);
  CHECK(book.sent(id, 0)->number == 6);
  REQUIRE(book.sent(id, 1)); // grants are not requests
  CHECK(book.sent(id, 1)->kind == call_kind::remote);
  CHECK_FALSE(book.sent(id, 2));
  book.diverged("somehow");
  CHECK_FALSE(book.sent(id, 0));
  CHECK(book.last_promise() == 9); // those were given away
  book.end();
  book.begin({step_id{10}, mode::record, 1, {}});
  CHECK(book.last_promise() == 0);
}

// -- pipelines that share modules ---------------------------------------------

namespace {

/// Books of the first ranks of two pipelines.
struct two_books {
  explicit two_books(const order_book::options& x) : first(x), second(x) {
    // nop
  }

  /// Plays step `n` on both, which take so long.
  /// @returns their plans
  std::array<step_plan, 2> play(uint64_t n, double took, double took_second) {
    std::vector<order_book::proposal> all;
    for (auto* x : books)
      all.push_back(x->propose());
    std::array<step_plan, 2> result;
    for (size_t i = 0; i < 2; ++i) {
      auto& x = *books[i];
      x.agree(all);
      result[i] = x.plan(step_id{n});
      if (!x.begin(result[i]))
        x.recorded(result[i], record_of(n));
      x.end();
      x.took(step_id{n}, i == 0 ? took : took_second);
    }
    return result;
  }

  order_book first;
  order_book second;
  std::array<order_book*, 2> books{&first, &second};
};

} // namespace

TEST_CASE("pipelines that share modules replay what the first one chooses",
          "[actors][static][R33]") {
  two_books x{{.static_mode = true, .steps = 3}};
  for (auto n : {1u, 2u, 3u})
    for (auto& plan : x.play(n, n == 2 ? 1 : 2, n == 3 ? 1 : 2))
      CHECK(plan.what == mode::record);
  for (auto n : {4u, 5u})
    for (auto& plan : x.play(n, 1, 1)) {
      CHECK(plan.what == mode::replay);
      CHECK(plan.source == step_id{2});
      CHECK_FALSE(plan.same_order); // it was not computed
    }
}

TEST_CASE("what a pipeline cannot replay is recorded again by all",
          "[actors][static][R33]") {
  two_books x{{.static_mode = true, .steps = 2}};
  x.play(1, 1, 1);
  x.play(2, 2, 2);
  x.second.clear();
  for (auto n : {3u, 4u})
    for (auto& plan : x.play(n, 1, 1))
      CHECK(plan.what == mode::record);
  for (auto& plan : x.play(5, 1, 1)) {
    CHECK(plan.what == mode::replay);
    CHECK(plan.source == step_id{3});
  }
}

TEST_CASE("pipelines that share modules know whether their orders are the same",
          "[actors][static][R33]") {
  two_books x{{.fixed_order = true}};
  auto choose = [&](size_t i, uint64_t step, uint64_t order) {
    x.books[i]->choose(0, step_id{step}, record_of(step), order);
  };
  x.play(1, 1, 1);
  choose(0, 1, 7);
  // The other one has computed nothing yet.
  for (auto& plan : x.play(2, 1, 1))
    CHECK(plan.what == mode::record);
  choose(0, 2, 7);
  choose(1, 2, 7);
  for (auto& plan : x.play(3, 1, 1)) {
    CHECK(plan.what == mode::replay);
    CHECK(plan.same_order);
  }
  choose(1, 2, 8);
  for (auto& plan : x.play(4, 1, 1)) {
    CHECK(plan.what == mode::replay);
    CHECK_FALSE(plan.same_order);
  }
}
