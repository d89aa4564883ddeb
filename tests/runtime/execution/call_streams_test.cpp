#include "tests/support/catch.hpp"

#include "runtime/execution/call_streams.hpp"
#include "tests/support/torch/random.hpp"

#include <torch/csrc/autograd/custom_function.h>
#include <torch/types.h>

#include <map>
#include <string>

// Which stream a draw comes from (R23). A call is told by the calls around it,
// outermost first; its numbers are computed from the words of the
// documentation.

using namespace smp;
using namespace smp::test;

namespace {

namespace ag = torch::autograd;

using torch::Tensor;

constexpr uint64_t body = 1234;

uint64_t id(const std::string& module) {
  return path_of_module(module);
}

/// The first number of a call's stream.
float first_of(const std::vector<called>& chain) {
  auto x = random_stream::derived(seed_of_call(body, chain));
  x.swap_with_default();
  auto result = torch::rand({1}).item<float>();
  x.swap_with_default();
  return result;
}

float draw() {
  return torch::rand({1}).item<float>();
}

struct microbatch {
  microbatch() : before(random_stream::of_default()) {
    streams.begin(body);
  }

  ~microbatch() {
    streams.end();
    CHECK(random_stream::of_default() == before);
  }

  float draw_in(const std::string& module) {
    streams.enter(id(module));
    auto result = draw();
    streams.leave();
    return result;
  }

  random_stream before;
  call_streams streams;
};

} // namespace

TEST_CASE("each call of a module draws from a stream of its own",
          "[runtime][streams][R23]") {
  microbatch x;
  x.streams.enter_body();
  torch::manual_seed(body); // which the body has already
  auto in_body = std::vector{draw(), draw()};
  x.streams.end();
  x.streams.begin(body);
  x.streams.enter_body();
  CHECK(draw() == in_body[0]);
  CHECK(x.draw_in("a") == first_of({{"a", 0}}));
  CHECK(x.draw_in("b") == first_of({{"b", 0}}));
  CHECK(x.draw_in("a") == first_of({{"a", 1}}));
  // What they drew is none of the body's.
  CHECK(draw() == in_body[1]);
}

TEST_CASE("a stream does not depend on what runs before",
          "[runtime][streams][R23]") {
  microbatch x;
  x.streams.enter_body();
  x.streams.enter(id("outer"));
  draw();
  CHECK(x.draw_in("b") == first_of({{"outer", 0}, {"b", 0}}));
  draw();
  CHECK(x.draw_in("a") == first_of({{"outer", 0}, {"a", 0}}));
  x.streams.leave();
  x.streams.enter(id("outer"));
  CHECK(x.draw_in("a") == first_of({{"outer", 1}, {"a", 0}}));
  CHECK(x.draw_in("b") == first_of({{"outer", 1}, {"b", 0}}));
  CHECK(x.draw_in("b") == first_of({{"outer", 1}, {"b", 1}}));
  x.streams.leave();
  CHECK(x.draw_in("b") == first_of({{"b", 0}}));
}

TEST_CASE("a call that is entered twice in a row is one",
          "[runtime][streams][R23]") {
  microbatch x;
  x.streams.enter_body();
  x.streams.enter(id("a"));
  auto first = draw();
  x.streams.enter(id("a"));
  auto second = draw();
  x.streams.leave();
  auto third = draw();
  x.streams.leave();
  auto expected = random_stream::derived(seed_of_call(body, {{"a", 0}}));
  expected.swap_with_default();
  for (auto y : {first, second, third})
    CHECK(y == draw());
  expected.swap_with_default();
  // Not if another one is between.
  x.streams.enter(id("a"));
  x.streams.enter(id("b"));
  CHECK(x.draw_in("a") == first_of({{"a", 1}, {"b", 0}, {"a", 0}}));
}

TEST_CASE("calls that run elsewhere count where they are made",
          "[runtime][streams][R23]") {
  microbatch here;
  call_streams there;
  there.begin(body);
  here.streams.enter_body();
  CHECK(here.draw_in("a") == first_of({{"a", 0}}));
  there.enter_at(here.streams.call(id("a")), id("a"));
  CHECK(draw() == first_of({{"a", 1}}));
  there.enter(id("inner"));
  CHECK(draw() == first_of({{"a", 1}, {"inner", 0}}));
  // Nobody else hears of it while others run.
  there.suspend();
  CHECK(here.draw_in("a") == first_of({{"a", 2}}));
  there.resume();
  there.leave();
  there.leave();
  CHECK(here.draw_in("a") == first_of({{"a", 3}}));
  there.end();
}

TEST_CASE("a range of calls elsewhere counts as the calls do here",
          "[runtime][streams][R23]") {
  // Module "b" stands in it twice.
  std::vector<uint64_t> range{id("a"), id("b"), 0, id("b")};
  microbatch here;
  here.streams.enter_body();
  here.streams.enter(id("outer"));
  CHECK(here.draw_in("b") == first_of({{"outer", 0}, {"b", 0}}));
  for (uint64_t pass : {0, 1}) {
    auto from = here.streams.call_each(range);
    call_streams there;
    there.begin(body);
    there.enter_origin(from);
    for (auto [module, number] :
         {std::pair{"a", pass}, {"b", 1 + 2 * pass}, {"b", 2 + 2 * pass}}) {
      there.enter(id(module));
      CHECK(draw() == first_of({{"outer", 0}, {module, number}}));
      there.leave();
    }
    there.end();
  }
  CHECK(here.draw_in("b") == first_of({{"outer", 0}, {"b", 5}}));
}

TEST_CASE("others draw nothing of a microbatch that waits",
          "[runtime][streams][R23]") {
  auto outside = random_stream::of_default();
  microbatch x;
  x.streams.suspend(); // has nothing to hide
  x.streams.resume();
  x.streams.enter_body();
  x.streams.enter(id("a"));
  x.streams.enter(id("b"));
  auto inside = random_stream::of_default();
  x.streams.suspend();
  CHECK(random_stream::of_default() == outside);
  auto mine = draw();
  x.streams.resume();
  CHECK(random_stream::of_default() == inside);
  x.streams.end();
  // What was drawn meanwhile was drawn.
  outside.swap_with_default();
  CHECK(draw() == mine);
  x.before = random_stream::of_default();
}

// -- backward -----------------------------------------------------------------

namespace {

/// What each named call drew, in its order.
using drawn = std::map<std::string, std::vector<float>>;

struct repeating : ag::Function<repeating> {
  /// Calls `a` and twice `b`, again in backward.
  static Tensor forward(ag::AutogradContext* ctx, Tensor x, microbatch* in,
                        drawn* forward, drawn* backward) {
    ctx->saved_data["in"] = reinterpret_cast<int64_t>(in);
    ctx->saved_data["to"] = reinterpret_cast<int64_t>(backward);
    call(*in, *forward);
    return x * 2;
  }

  static ag::variable_list backward(ag::AutogradContext* ctx,
                                    ag::variable_list grads) {
    call(*reinterpret_cast<microbatch*>(ctx->saved_data["in"].toInt()),
         *reinterpret_cast<drawn*>(ctx->saved_data["to"].toInt()));
    return {grads[0] * 2, {}, {}, {}};
  }

  static void call(microbatch& in, drawn& to) {
    for (auto* module : {"b", "a", "b"})
      to[module].push_back(in.draw_in(module));
  }
};

} // namespace

TEST_CASE("a call that backward repeats draws the same numbers again",
          "[runtime][streams][R23]") {
  microbatch x;
  drawn forward[4];
  drawn backward[4];
  x.streams.enter_body();
  auto at = [&](int i, const Tensor& y) {
    return repeating::apply(y, &x, &forward[i], &backward[i]);
  };
  auto leaf = torch::ones({1}, torch::requires_grad());
  auto y = at(0, leaf);
  x.draw_in("a"); // not in a node
  x.streams.enter(id("outer"));
  y = at(1, y);
  x.streams.leave();
  x.streams.enter(id("outer"));
  auto z = at(2, y);
  y = z + at(3, y);
  x.streams.leave();
  SECTION("where it was made") {
    x.streams.begin_backward();
  }
  SECTION("in another execution") {
    auto made = x.streams.take_made();
    x.streams.end();
    x.streams.begin(body);
    x.streams.begin_backward(made);
    x.streams.enter_at(99, 0);
  }
  for (auto again : {true, false}) {
    x.streams.begin_backward();
    y.backward({}, again);
    for (int i = 0; i < 4; ++i) {
      CAPTURE(i);
      CHECK(backward[i] == forward[i]);
      backward[i].clear();
    }
  }
  CHECK(forward[3]["b"][1] == first_of({{"outer", 1}, {"b", 3}}));
}
