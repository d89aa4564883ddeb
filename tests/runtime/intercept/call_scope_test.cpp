#include "tests/support/catch.hpp"

#include "runtime/intercept/call_scope.hpp"
#include "runtime/offload/offloaded_tensors.hpp"

#include <ATen/Functions.h>

#include <array>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

// Who hears of a call, in which order, and what of one that fails.

using namespace smp;

namespace {

using lines = std::vector<std::string>;

/// Notes what it hears.
class noting final : public call_interceptor {
public:
  noting(std::string name, lines& out) : name_(std::move(name)), out_(out) {
    // nop
  }

  void enter(const intercepted_call& x) override {
    note("enter " + std::to_string(x.module.value().value));
    if (refuses)
      throw std::runtime_error{name_ + " refuses"};
  }

  bool looks() const noexcept override {
    return wants;
  }

  void arguments(const intercepted_call&, const void* object,
                 std::span<const at::Tensor> xs) override {
    note(std::string{object == this ? "its " : ""} + "arguments "
         + std::to_string(xs.size()));
  }

  void results(const intercepted_call&,
               std::span<const at::Tensor> xs) override {
    note("results " + std::to_string(xs.size()));
  }

  void leave(const intercepted_call&, bool failed) override {
    note(failed ? "leave failed" : "leave");
  }

  std::unique_ptr<offloaded_tensors>
  keep(const std::vector<at::Tensor>& xs) override {
    note("keep " + std::to_string(xs.size()));
    return takes ? std::make_unique<offloaded_tensors>() : nullptr;
  }

  bool refuses = false;
  bool wants = false;
  bool takes = false;

private:
  void note(const std::string& what) {
    out_.push_back(name_ + ": " + what);
  }

  const std::string name_;
  lines& out_;
};

/// Three of the places, which are taken from the inside to the outside.
struct scope_fixture {
  scope_fixture() {
    set_interceptor(interceptor::activity, &inner);
    set_interceptor(interceptor::state, &middle);
    set_interceptor(interceptor::order, &outer);
  }

  ~scope_fixture() {
    for (auto place :
         {interceptor::order, interceptor::state, interceptor::activity})
      set_interceptor(place, nullptr);
  }

  static intercepted_call call(uint64_t module) {
    return {.module = module_id{module}};
  }

  lines heard;
  noting outer{"order", heard};
  noting middle{"state", heard};
  noting inner{"activity", heard};
};

} // namespace

TEST_CASE_METHOD(scope_fixture,
                 "interceptors hear of a call by their places, and back",
                 "[runtime][intercept]") {
  {
    call_scope scope{call(3)};
    CHECK_FALSE(scope.looks());
    heard.push_back("it runs");
  }
  CHECK(heard
        == lines{"order: enter 3", "state: enter 3", "activity: enter 3",
                 "it runs", "activity: leave", "state: leave", "order: leave"});
}

TEST_CASE_METHOD(scope_fixture, "calls of a thread nest",
                 "[runtime][intercept]") {
  set_interceptor(interceptor::state, nullptr);
  set_interceptor(interceptor::activity, nullptr);
  {
    call_scope around{call(1)};
    call_scope within{call(2)};
  }
  CHECK(heard
        == lines{"order: enter 1", "order: enter 2", "order: leave",
                 "order: leave"});
}

TEST_CASE_METHOD(scope_fixture,
                 "tensors are looked for where one interceptor wants them",
                 "[runtime][intercept]") {
  set_interceptor(interceptor::state, nullptr);
  inner.wants = true;
  const std::array xs{at::zeros({1}), at::zeros({2})};
  call_scope scope{call(1)};
  CHECK(scope.looks());
  heard.clear();
  scope.arguments(&outer, xs);
  scope.results({});
  CHECK(heard
        == lines{"order: its arguments 2", "activity: arguments 2",
                 "order: results 0", "activity: results 0"});
}

TEST_CASE_METHOD(scope_fixture,
                 "what is kept for backward goes to the first who takes it",
                 "[runtime][intercept][R57]") {
  const std::vector xs{at::zeros({1}), at::zeros({2})};
  CHECK(keep_for_backward(xs) == nullptr);
  heard.clear();
  middle.takes = true;
  CHECK(keep_for_backward(xs) != nullptr);
  CHECK(heard == lines{"order: keep 2", "state: keep 2"});
}

TEST_CASE_METHOD(scope_fixture,
                 "who let a call in hears that another one refused it",
                 "[runtime][intercept]") {
  middle.refuses = true;
  CHECK_THROWS_WITH(call_scope{call(1)}, "state refuses");
  // Those further inside never heard of it, nor does who refused.
  CHECK(heard
        == lines{"order: enter 1", "state: enter 1", "order: leave failed"});
}

TEST_CASE_METHOD(scope_fixture, "an exception of the call is a failure of it",
                 "[runtime][intercept]") {
  auto run = [&] {
    call_scope scope{call(1)};
    throw std::runtime_error{"boom"};
  };
  CHECK_THROWS_WITH(run(), "boom");
  CHECK(heard
        == lines{"order: enter 1", "state: enter 1", "activity: enter 1",
                 "activity: leave failed", "state: leave failed",
                 "order: leave failed"});
}

TEST_CASE_METHOD(scope_fixture,
                 "a call while an exception is on its way is none that fails",
                 "[runtime][intercept]") {
  struct calls_at_its_end {
    ~calls_at_its_end() {
      call_scope scope{call(2)};
    }
  };
  auto run = [] {
    calls_at_its_end x;
    throw std::runtime_error{"boom"};
  };
  CHECK_THROWS_WITH(run(), "boom");
  CHECK(heard
        == lines{"order: enter 2", "state: enter 2", "activity: enter 2",
                 "activity: leave", "state: leave", "order: leave"});
}
