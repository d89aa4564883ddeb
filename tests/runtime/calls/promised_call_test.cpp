#include "tests/support/catch.hpp"

#include "actors/protocol/request_number.hpp"
#include "actors/protocol/result_name.hpp"
#include "runtime/values/tensor_bridge.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/torch/lone_rank.hpp"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

// R38 to R41: what a rank knows of calls before they ran, and what it remembers
// until they did.

using namespace smp;
using namespace smp::test;

namespace {

constexpr module_id theirs{2};

prediction_ptr one_tensor(at::ScalarType dtype, bool requires_grad,
                          size_t dim = 1) {
  prediction result;
  result.result = value::tensor(0);
  result.tensors = {remote_tensor::foretold(dtype, requires_grad, dim)};
  return std::make_shared<const prediction>(std::move(result));
}

/// The name of a result of promise `number` of rank 0.
object_id promised_result(uint32_t number, step_id s = step_id{1}) {
  return result_name(rank_id{1}, {rank_id{0}, promise_number(s, number)}, s, 0);
}

/// A request to rank 1 with one result.
sent_request_ptr request_with(bool pushed) {
  auto result = std::make_shared<sent_request>();
  result->owner = rank_id{1};
  result->module = theirs;
  result->name = "theirs";
  result->number = promise_number(step_id{1}, 1);
  result->why = {"theirs", rank_id{1}};
  result->pushed = {pushed};
  return result;
}

call_reply reply_with(const std::vector<remote_tensor>& tensors) {
  call_reply result;
  result.tensors = tensors;
  result.reaches = {{0}};
  return result;
}

/// As it is read from a message.
remote_tensor content(const at::Tensor& x) {
  auto result = remote_tensor::of(x, true);
  result.meta = to_tensor_ref(x, false);
  return result;
}

promise_book& promises_of(lone_rank& rank) {
  return *rank.rank_context::model()->promises;
}

const model_map& map_of(lone_rank& rank) {
  return *rank.rank_context::model()->map;
}

} // namespace

// -- answers ------------------------------------------------------------------

TEST_CASE("an answer that does not tell what was asked for is refused",
          "[runtime][promised_call][R38]") {
  auto refused = [](bool pushed, const std::vector<remote_tensor>& tensors) {
    return error_of([&] { request_with(pushed)->take(reply_with(tensors)); },
                    error_code::protocol);
  };
  auto here = content(at::ones({2}));
  auto there = remote_tensor::held(at::ones({2}));
  CHECK(refused(true, {}) == "answer of 'theirs': 0 results instead of 1");
  CHECK(refused(true, {here, here})
        == "answer of 'theirs': 2 results instead of 1");
  CHECK(refused(true, {here}) == "no error");
  CHECK(refused(true, {there}) == "answer of 'theirs': result 0 does not come");
  CHECK(refused(false, {there}) == "no error");
  CHECK(refused(false, {here}) == "answer of 'theirs': result 0 comes unasked");
  CHECK(refused(false, {remote_tensor::argument(0)})
        == "answer of 'theirs': result 0 is missing");
  CHECK(refused(false, {remote_tensor::foretold(at::kFloat, false, 1)})
        == "answer of 'theirs': result 0 has no sizes");
}

// -- what callers take --------------------------------------------------------

TEST_CASE("what a caller took of a result is news if it is not as before",
          "[runtime][promised_call][R38]") {
  taken_results taken;
  CHECK_FALSE(taken.find(2));
  CHECK(taken.note(2, false));
  CHECK_FALSE(taken.note(2, false));
  CHECK(taken.note(0, true));
  CHECK(taken.note(3, true));
  CHECK(taken.note(3, false));
  CHECK(taken.find(0) == true);
  CHECK(taken.find(2) == false);
  CHECK_FALSE(taken.find(1));
  CHECK(taken.left() == std::vector<uint32_t>{2, 3});
}

// -- predictions --------------------------------------------------------------

TEST_CASE("a kind of call is predicted once one of it was seen",
          "[runtime][promised_call][R38]") {
  lone_rank rank;
  promise_book book{true, rank.records()};
  auto seen = one_tensor(at::kFloat, true);
  CHECK_FALSE(book.find("kind", 0));
  book.remember("kind", seen);
  CHECK(book.learnt());
  book.begin_step(0);
  CHECK_FALSE(book.learnt());
  auto known = book.find("kind", 0);
  REQUIRE(known);
  CHECK(known->next == seen);
  CHECK_FALSE(book.find("another kind", 0));
  // What is taken of it is known by the place of the call.
  REQUIRE(known->taken);
  CHECK(book.find("kind", 0)->taken == known->taken);
  CHECK(book.find("kind", 1)->taken != known->taken);
  // As many dimensions as there happen to be.
  book.remember("kind", one_tensor(at::kFloat, true, 3));
  CHECK_FALSE(book.learnt());
  CHECK(book.find("kind", 0)->next == seen);
}

TEST_CASE("a kind of call that does not do the same each time always waits",
          "[runtime][promised_call][R38]") {
  lone_rank rank;
  promise_book book{true, rank.records()};
  auto seen = one_tensor(at::kFloat, true);
  book.remember("kind", seen);
  book.begin_step(0);
  auto other = GENERATE(one_tensor(at::kHalf, true),
                        one_tensor(at::kFloat, false), prediction_ptr{});
  book.remember("kind", other);
  CHECK(book.learnt());
  book.remember("kind", seen);
  auto known = book.find("kind", 0);
  REQUIRE(known);
  CHECK_FALSE(known->next);
  // Unless that was due to state which turned out not to be there.
  book.reconsider();
  CHECK_FALSE(book.find("kind", 0));
  book.remember("kind", seen);
  CHECK(book.find("kind", 0)->next == seen);
}

TEST_CASE("what calls return is known by which tensors require grad",
          "[runtime][promised_call][R38]") {
  lone_rank rank;
  promise_book book{true, rank.records()};
  book.begin_step(1);
  book.remember("kind", one_tensor(at::kFloat, true));
  book.begin_step(2);
  CHECK_FALSE(book.find("kind", 0));
  book.begin_step(1);
  CHECK(book.find("kind", 0));
  // So many of them are known at a time.
  for (uint64_t i = 0; i < order_book::max_keys; ++i)
    book.begin_step(10 + i);
  book.begin_step(1);
  CHECK_FALSE(book.find("kind", 0));
}

TEST_CASE("kinds of calls that never end are forgotten between steps",
          "[runtime][promised_call][R38]") {
  lone_rank rank;
  promise_book book{true, rank.records()};
  auto seen = one_tensor(at::kFloat, true);
  for (size_t i = 0; i < promise_book::max_kinds; ++i)
    book.remember("text " + std::to_string(i), seen);
  book.begin_step(0);
  CHECK(book.find("text 0", 0));
  book.remember("one more", seen);
  CHECK(book.find("text 0", 0));
  book.begin_step(0);
  CHECK_FALSE(book.find("text 0", 0));
  CHECK_FALSE(book.find("one more", 0));
  book.remember("text 0", seen);
  CHECK(book.find("text 0", 0));
}

TEST_CASE("nothing is predicted in a step in which every call waits",
          "[runtime][promised_call][R38]") {
  lone_rank rank;
  promise_book book{true, rank.records()};
  book.remember("kind", one_tensor(at::kFloat, true));
  book.begin_step(0, true);
  CHECK(book.all_wait());
  CHECK(book.learnt());
  CHECK_FALSE(book.find("kind", 0));
  book.begin_step(0);
  CHECK_FALSE(book.all_wait());
  CHECK(book.find("kind", 0));
}

TEST_CASE("calls are of one kind if only numbers and sizes differ",
          "[runtime][promised_call][R38]") {
  auto kind = [](const value& x, const at::Tensor& t, call_target target = {}) {
    return kind_of_call(theirs, target, value::tuple({x, value::tensor(0)}),
                        {t});
  };
  auto one = value::of(int64_t{1});
  auto t = at::ones({2});
  auto known = kind(one, t);
  CHECK(kind(value::of(int64_t{7}), at::zeros({5})) == known);
  CHECK(kind(value::of(1.0), t) != known);
  CHECK(kind(value::list({one}), t) != known);
  CHECK(kind(one, at::ones({2, 1})) != known);
  CHECK(kind(one, at::ones({2}, at::kInt)) != known);
  CHECK(kind(one, at::ones({2}).set_requires_grad(true)) != known);
  CHECK(kind(value::of("a"), t) != kind(value::of("b"), t));
  CHECK(kind(value::list({one}), t)
        == kind(value::list({value::of(int64_t{7})}), t));
  call_target evaluation;
  evaluation.training = false;
  CHECK(kind(one, t, evaluation) != known);
  CHECK(
    kind_of_call(module_id{1}, {}, value::tuple({one, value::tensor(0)}), {t})
    != known);
  at::NoGradGuard no_grad;
  CHECK(kind(one, t) != known);
}

// -- which calls wait ---------------------------------------------------------

TEST_CASE("calls of the modules that a user names wait, and ranges with them",
          "[runtime][promised_call][R38]") {
  lone_rank rank;
  auto& map = map_of(rank);
  promise_book book{true, rank.records()};
  CHECK_FALSE(book.waits(map, theirs, {}));
  book.set_waiting(map, {"theirs"});
  CHECK(book.waits(map, theirs, {}));
  CHECK_FALSE(book.waits(map, module_id{1}, {}));
  call_target range;
  range.kind = request_kind::range;
  range.last = 1; // "mine" alone
  CHECK_FALSE(book.waits(map, module_id{0}, range));
  range.last = 2;
  CHECK(book.waits(map, module_id{0}, range));
  CHECK(cause_of([&] { book.set_waiting(map, {"ours"}); }, error_code::config)
        == "smp.no_promises: no module is called \"ours\"; the model has mine, "
           "theirs");
  book.set_waiting(map, {"*", "!theirs"});
  CHECK(book.waits(map, module_id{1}, {}));
  CHECK_FALSE(book.waits(map, theirs, {}));
  promise_book off{false, rank.records()};
  CHECK(off.waits(map, module_id{1}, {}));
}

// -- names --------------------------------------------------------------------

TEST_CASE("promises are numbered anew in each step",
          "[runtime][promised_call][R33]") {
  lone_rank rank;
  auto& ex = rank.running();
  promise_book book{true, rank.records()};
  book.begin_step(0);
  CHECK_FALSE(book.promised());
  CHECK(book.next_request(ex) == promise_number(step_id{1}, 1));
  CHECK(book.next_request(ex) == promise_number(step_id{1}, 2));
  CHECK(book.promised());
  book.end_step();
  book.begin_step(0);
  CHECK_FALSE(book.promised());
  CHECK(book.next_request(ex) == promise_number(step_id{1}, 1));
}

// -- letting go ---------------------------------------------------------------

TEST_CASE("what is no longer needed is said once, and forgotten with the step",
          "[runtime][promised_call][R38]") {
  lone_rank rank;
  promise_book book{true, rank.records()};
  auto x = promised_result(1), y = promised_result(2);
  book.release(rank_id{1}, x);
  book.release(rank_id{1}, y);
  book.release(rank_id{2}, x);
  CHECK((book.take_releases(rank_id{1}, step_id{1}) == std::vector{x, y}));
  CHECK(book.take_releases(rank_id{1}, step_id{1}).empty());
  book.end_step();
  CHECK(book.take_releases(rank_id{2}, step_id{1}).empty());
}

TEST_CASE("all ranks that heard of a promise are told that it can go",
          "[runtime][promised_call][R38]") {
  auto rank = std::make_shared<lone_rank>(true);
  auto& book = promises_of(*rank);
  auto id = promised_result(1);
  SECTION("in its step") {
    {
      promised_value x{*rank, request_with(false), 0, id, {}};
      x.tell(rank_id{3});
      x.tell(rank_id{3});
      CHECK(book.take_releases(rank_id{1}, step_id{1}).empty());
    }
    CHECK((book.take_releases(rank_id{1}, step_id{1}) == std::vector{id}));
    CHECK((book.take_releases(rank_id{3}, step_id{1}) == std::vector{id}));
  }
  SECTION("between its step and the next") {
    promises_of(*rank).end_step();
    { promised_value x{*rank, request_with(false), 0, id, {}}; }
    CHECK(book.take_releases(rank_id{1}, step_id{2}).empty());
  }
  SECTION("but not later: they let go of everything by themselves") {
    id = promised_result(1, step_id{9});
    { promised_value x{*rank, request_with(false), 0, id, {}}; }
    CHECK(book.take_releases(rank_id{1}, step_id{1}).empty());
  }
}

TEST_CASE("a result that came and was not read does not come the next time",
          "[runtime][promised_call][R38]") {
  auto rank = std::make_shared<lone_rank>(true);
  auto& book = promises_of(*rank);
  book.begin_step(0);
  auto taken = std::make_shared<taken_results>();
  taken->note(0, true);
  auto reads = GENERATE(false, true);
  CAPTURE(reads);
  {
    auto request = request_with(true);
    promised_value x{*rank, request, 0, promised_result(1), {}, taken};
    if (reads)
      CHECK((x.content() == request)); // it comes with the answer
  }
  CHECK(taken->find(0) == reads);
  CHECK(book.learnt() == !reads);
}

// -- answers ------------------------------------------------------------------

TEST_CASE("an answer brings sizes, and the content that was asked for",
          "[runtime][promised_call][R38]") {
  auto rank = std::make_shared<lone_rank>(true);
  auto request = request_with(true);
  promised_value x{*rank, request, 0, promised_result(1), {}};
  CHECK_FALSE(x.here());
  request->take(reply_with({content(at::full({2}, 5.0))}));
  request->set();
  CHECK(x.sizes() == std::vector<int64_t>{2});
  CHECK((x.strides() == std::vector<int64_t>{})); // row-major
  CHECK((request->reaches == reached_positions{{0}}));
  x.wait();
  CHECK(at::equal(x.take(), at::full({2}, 5.0)));
  CHECK(cause_of([&] { x.take(); }) == "a fetched result is gone");
}

TEST_CASE("sizes and strides that a record foretells need no answer",
          "[runtime][promised_call][R33][R63]") {
  using numbers = std::vector<int64_t>;
  auto rank = std::make_shared<lone_rank>(true);
  auto transposed = GENERATE(false, true);
  CAPTURE(transposed);
  auto then = transposed ? at::ones({3, 2}).t() : at::ones({2});
  auto pushed = GENERATE(false, true);
  auto recorded = request_with(pushed);
  recorded->take(
    reply_with({pushed ? content(then) : remote_tensor::held(then)}));
  auto request = request_with(pushed);
  request->recorded = recorded;
  promised_value x{*rank, request, 0, promised_result(1), {}};
  CHECK(x.sizes() == (transposed ? numbers{2, 3} : numbers{2}));
  CHECK((x.strides() == (transposed ? numbers{1, 2} : numbers{})));
  CHECK_FALSE(request->done());
  // Once it is there it counts.
  request->take(reply_with(
    {pushed ? content(at::ones({3})) : remote_tensor::held(at::ones({3}))}));
  request->set();
  CHECK(x.sizes() == numbers{3});
  CHECK((x.strides() == numbers{}));
  CHECK(request->difference()
        == (transposed ? "the record has [2, 3] with strides [1, 2] as result "
                         "0, this step [3]"
                       : "the record has [2] as result 0, this step [3]"));
}

TEST_CASE("sizes that nobody read may differ from the record's",
          "[runtime][promised_call][R33][R63]") {
  auto told = [](const at::Tensor& x) {
    auto result = request_with(false);
    result->take(reply_with({remote_tensor::held(x)}));
    return result;
  };
  auto differs = [&](const at::Tensor& then, const at::Tensor& now, bool read) {
    auto x = request_with(false);
    x->recorded = told(then);
    if (read)
      CHECK(x->known(0));
    x->take(reply_with({remote_tensor::held(now)}));
    return x->difference().has_value();
  };
  auto x = at::ones({4, 1, 3});
  CHECK(differs(x, at::ones({4, 3}), true));
  CHECK_FALSE(differs(x, at::ones({4, 3}), false));
  CHECK(differs(x, at::ones({3, 1, 4}).transpose(0, 2), true));
  // Strides of axes of one element depend on timing.
  CHECK_FALSE(differs(x, x.as_strided({4, 1, 3}, {3, 1, 1}), true));
}

TEST_CASE("a result that is read after its step is refused by name",
          "[runtime][promised_call][R38]") {
  auto rank = std::make_shared<lone_rank>(true);
  promised_value x{
    *rank, request_with(false), 0, promised_result(1, step_id{9}), {}};
  auto failed = failure_of([&] { x.wait(); });
  CHECK(failed.code == error_code::unsupported);
  CHECK(failed.module == "theirs");
  CHECK(failed.text == "a result is read after the end of its step");
}

TEST_CASE("a promise whose answer is a failure fails with it",
          "[runtime][promised_call][R39]") {
  auto rank = std::make_shared<lone_rank>(true);
  auto& ex = rank->running();
  auto argument = std::make_shared<promised_value>(
    *rank, request_with(false), 0, promised_result(2), tensor_meta{});
  auto request = request_with(false);
  request->arguments = {argument};
  send(
    ex,
    promise_call(remote_call(rank_id{1}, theirs, phase::forward, {},
                             answer_of("theirs", phase::forward, rank_id{1}))),
    request);
  REQUIRE(ex.sent.size() == 1);
  CHECK(ex.sent[0].kind == call_kind::promise);
  CHECK(ex.sent[0].number == request->number);
  CHECK_FALSE(request->done());
  CHECK(argument.use_count() == 2); // the request names it
  failure broken{error_code::user_code, rank_id{1}, "theirs", "is broken"};
  ex.sent[0].answer->fail(broken);
  CHECK(request->done());
  CHECK(argument.use_count() == 1);
  CHECK((failure_of([&] { fence(ex); }) == broken));
  CHECK_NOTHROW(fence(ex)); // it waits for nothing twice
}
