#include "tests/support/catch.hpp"

#include "runtime/model/script_walk.hpp"
#include "tests/support/torch/lone_rank.hpp"

#include <ATen/ATen.h>
#include <torch/csrc/jit/api/module.h>

#include <memory>
#include <optional>
#include <utility>

// R52: what is computed again finds the state that it found the first time, and
// leaves the state that it found.

using namespace smp;
using namespace smp::test;

namespace {

using pass = recompute_pass::kind;

constexpr module_id whole{0};
constexpr uint64_t body = 0; // the path of what no call encloses

struct counting : torch::nn::Module {
  counting()
    : count(register_buffer("count", at::full({2}, 1.0))),
      mask(register_buffer("mask", at::ones({3}))) {
    // nop
  }

  at::Tensor count, mask;
};

walked_model walk_script(const torch::jit::Module& x) {
  auto result = walk(x._ivalue());
  result.modules[0].stateful = "sets its attribute 'seen'";
  return result;
}

/// Microbatches pass the whole model in their order, on a rank by itself.
struct stateful_call {
  explicit stateful_call(const walked_model& x) : map(rank_id{0}, 2, x) {
    map.replace(x, {});
  }

  running_call& ex() {
    return rank.running();
  }

  void enter() {
    states.enter(ex(), changes, whole);
  }

  void leave() {
    states.leave(ex(), changes, whole);
  }

  /// @param backward what runs after the call, before its state is dropped
  template <class F, class G = void (*)()>
  void call(
    pass what, F&& f, G&& backward = [] {}) {
    std::optional<call_states::recalled> recalled;
    if (what == pass::again)
      recalled.emplace(states);
    {
      running_call::pass_scope scope{ex(), {what, 0}, 1};
      enter();
      f();
      leave();
    }
    backward();
  }

  /// What the first pass kept of a call in the step body; null: nothing.
  std::shared_ptr<const module_state> kept() {
    return rank.calls().state(ex().step(), ex().microbatch(), body, whole);
  }

  lone_rank rank;
  model_map map;
  map_changes changes{map};
  call_states states;
};

struct counted_call {
  std::shared_ptr<counting> model = std::make_shared<counting>();
  stateful_call calls{walk(*model)};
  at::Tensor& count = model->count;

  bool counts(double x) const {
    return at::equal(count, at::full({2}, x));
  }
};

} // namespace

TEST_CASE("what is computed again finds what it found the first time",
          "[runtime][call_states][R52]") {
  counted_call x;
  x.calls.call(pass::first, [&] { x.count.add_(1); });
  x.count.fill_(9); // later microbatches
  for (int i = 0; i < 2; ++i) {
    x.calls.call(pass::again, [&] {
      CHECK(x.counts(1));
      x.count.add_(1);
    });
    CHECK(x.counts(9));
  }
}

TEST_CASE("backward reads what the second pass left, call by call",
          "[runtime][call_states][R52]") {
  counted_call x;
  x.calls.call(pass::first, [&] { x.count.add_(1); });
  x.count.fill_(9);
  x.calls.call(
    pass::again, [&] { x.count.add_(1); },
    [&] {
      CHECK(x.counts(2));
      x.calls.states.suspend(); // it sends a gradient
      CHECK(x.counts(9));
      x.calls.states.resume();
      CHECK(x.counts(2));
    });
  CHECK(x.counts(9));
}

TEST_CASE("an execution that runs while a call waits finds the current state",
          "[runtime][call_states][R52]") {
  counted_call x;
  x.calls.call(pass::first, [&] { x.count.add_(1); });
  x.count.fill_(9);
  x.calls.call(pass::again, [&] {
    x.count.add_(1);
    x.calls.states.suspend();
    CHECK(x.counts(9));
    x.count.add_(1); // another microbatch
    x.calls.states.resume();
    CHECK(x.counts(2));
  });
  CHECK(x.counts(10));
}

TEST_CASE("only what a call changed is kept, as it was before",
          "[runtime][call_states][R52]") {
  counted_call x;
  x.calls.call(pass::first, [&] { x.count.add_(1); });
  auto kept = x.calls.kept();
  REQUIRE(kept);
  REQUIRE(kept->tensors.size() == 1);
  CHECK(kept->tensors[0].first == x.calls.map.model().find(x.count));
  CHECK(at::equal(kept->tensors[0].second, at::full({2}, 1.0)));
}

TEST_CASE("nothing is kept of a call that changes nothing",
          "[runtime][call_states][R52]") {
  counted_call x;
  SECTION("as it only reads") {
    x.calls.call(pass::first, [] {});
    CHECK_FALSE(x.calls.kept());
    // It leaves what it found even if it changes something now.
    x.calls.call(pass::again, [&] { x.count.add_(1); });
    CHECK(x.counts(1));
  }
  SECTION("or is not computed again") {
    x.calls.call(pass::only, [&] { x.count.add_(1); });
    CHECK_FALSE(x.calls.kept());
    CHECK(x.counts(2));
  }
  SECTION("or whose module is known to keep its state") {
    REQUIRE(x.calls.map.order().learn({{}, {0}}));
    x.calls.call(pass::first, [&] { x.count.add_(1); });
    CHECK_FALSE(x.calls.kept());
  }
}

TEST_CASE("a buffer that the first step left alone is not copied in later ones",
          "[runtime][call_states][R52]") {
  counted_call x;
  auto& rank = x.calls.rank;
  x.calls.call(pass::first, [&] { x.count.add_(1); });
  rank.counters().step = 2;
  auto next = rank.asking({});
  next.step = step_id{2};
  rank.running().start(next);
  x.calls.call(pass::first, [&] {
    x.count.add_(1);
    x.model->mask.add_(1);
  });
  auto kept = x.calls.kept();
  REQUIRE(kept);
  REQUIRE(kept->tensors.size() == 1);
  CHECK(at::equal(kept->tensors[0].second, at::full({2}, 2.0)));
}

TEST_CASE("what is thrown away with a call leaves the state as it is",
          "[runtime][call_states][R52]") {
  counted_call x;
  x.calls.call(pass::first, [&] { x.count.add_(1); });
  running_call::pass_scope scope{x.calls.ex(), {pass::again, 0}, 1};
  x.calls.enter();
  CHECK(x.counts(1));
  x.calls.states.end();
  x.calls.states.suspend();
  x.calls.leave(); // of a call that is over
  CHECK(x.counts(1));
}

TEST_CASE("attributes of TorchScript change back as well",
          "[runtime][call_states][R52]") {
  torch::jit::Module model{"counted_attribute"};
  model.register_attribute("seen", c10::IntType::get(), int64_t{3});
  model.define(R"(
    def forward(self, x):
      self.seen = self.seen + 1
      return x
  )");
  auto self = model._ivalue();
  auto slot = model.type()->getAttributeSlot("seen");
  auto seen = [&] { return self->getSlot(slot).toInt(); };
  auto set = [&](int64_t y) { self->setSlot(slot, y); };
  stateful_call x{walk_script(model)};
  x.call(pass::first, [&] { set(4); });
  set(9);
  x.call(pass::again, [&] {
    CHECK(seen() == 3);
    set(4);
    x.states.suspend();
    CHECK(seen() == 9);
    set(10);
    x.states.resume();
    CHECK(seen() == 4);
  });
  CHECK(seen() == 10);
}
