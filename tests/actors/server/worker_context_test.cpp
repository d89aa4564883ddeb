#include "tests/support/catch.hpp"

#include "actors/protocol/server_handle.hpp"
#include "actors/server/worker_context.hpp"
#include "tests/support/actors/actor_fixture.hpp"
#include "tests/support/actors/scripted_executor.hpp"

#include <caf/event_based_actor.hpp>

#include <chrono>
#include <string>
#include <vector>

using namespace smp;

namespace {

struct context_fixture : actor_fixture, stage {
  context_fixture() {
    script[{3}] = {do_call(1, 4), do_return("x")};
    script[{4}] = {do_crash("bug")};
    server = own(sys.spawn([this](caf::event_based_actor*) -> caf::behavior {
      return {
        [this](const suspended& x) { calls.push_back(x.what); },
        [this](const asked& x) { promises.push_back(x.what); },
        [this](const finished& x) { outcomes.push_back(x.result); },
        [this](const step_failed& x) { failures.push_back(x); },
      };
    }));
    code = std::make_shared<scripted_executor>(rank_id{0}, *this);
    code->attach(context_id{9},
                 std::make_shared<server_handle>(server_handle{
                   caf::actor_cast<module_server_actor>(server)}));
    ctx = own(sys.spawn(worker_context, code));
    sched.run();
  }

  ~context_fixture() {
    for (auto& x : spawned)
      caf::anon_send_exit(x, caf::exit_reason::kill);
    sched.run();
  }

  context_status status() {
    return ask<context_status>(ctx, status_atom_v);
  }

  request make_request(uint64_t module) {
    return {{rank_id{5}, 6},   step_id{1},     microbatch_id{2},
            module_id{module}, phase::forward, {}};
  }

  /// Brings the context into a state.
  void go_to(context_state x) {
    if (x == context_state::idle)
      return;
    CHECK_FALSE(code->start(make_request(3)));
    if (x == context_state::pending) {
      advance_one();
      sched.run();
    }
  }

  caf::actor server;
  std::shared_ptr<scripted_executor> code;
  worker_context_actor ctx;
  std::vector<call> calls;
  std::vector<call> promises;
  std::vector<outcome> outcomes;
  std::vector<step_failed> failures;
};

} // namespace

TEST_CASE_METHOD(context_fixture,
                 "a context goes through its states and tells them",
                 "[actors][context]") {
  CHECK(status().state == context_state::idle);
  CHECK_FALSE(code->start(make_request(3)));
  auto x = status();
  CHECK(x.state == context_state::executing); // while its code runs
  CHECK(x.context == context_id{9});
  CHECK(x.current == request_id{rank_id{5}, 6});
  CHECK(x.microbatch == microbatch_id{2});
  CHECK(x.module == module_id{3});
  CHECK(x.waits_for.empty());
  advance_one();
  sched.run();
  sched.advance_time(std::chrono::seconds(3));
  x = status();
  CHECK(x.state == context_state::pending);
  CHECK(x.waits_for == "module 4 from rank 1");
  CHECK(x.seconds == Catch::Approx(3));
  REQUIRE(calls.size() == 1);
  CHECK(calls[0].module == module_id{4});
  CHECK_FALSE(code->resume(response{{}, text_payload("y"), {}}));
  CHECK(status().state == context_state::executing);
  advance_one();
  x = status();
  CHECK(x.state == context_state::idle);
  CHECK(x.served == 1);
  REQUIRE(outcomes.size() == 1);
  CHECK(text_of(outcomes[0].body) == "xy");
}

TEST_CASE_METHOD(context_fixture,
                 "a context does what fits its state and refuses the rest",
                 "[actors][context][R24]") {
  using enum context_state;
  auto state = GENERATE(idle, executing, pending);
  auto kind = GENERATE(0, 1, 2, 3, 4);
  go_to(state);
  INFO("state " << to_string(state) << ", kind " << kind);
  auto told = calls.size() + promises.size() + outcomes.size();
  auto legal = state == executing;
  failure err;
  switch (kind) {
    case 0:
      legal = state == idle;
      err = code->start(make_request(3));
      break;
    case 1:
      legal = state == pending;
      err = code->resume(response{});
      break;
    case 2:
      code->leave(call{});
      break;
    case 3:
      code->send(call{});
      break;
    default:
      code->finish(outcome{});
  }
  sched.run();
  if (kind < 2) {
    CHECK(legal == !err);
    CHECK((legal
           || err.text
                == std::string{"the WORKER CONTEXT is "} + to_string(state)));
    CHECK(failures.empty());
  } else {
    // A defect of the executor ends the step that it is in.
    CHECK(failures.size() == (legal ? 0 : 1));
    CHECK(calls.size() + promises.size() + outcomes.size()
          == told + (legal ? 1 : 0));
  }
  if (!legal)
    CHECK(status().state == state);
}

TEST_CASE_METHOD(context_fixture, "nothing starts once a context has ended",
                 "[actors][context]") {
  caf::anon_send_exit(ctx, caf::exit_reason::user_shutdown);
  sched.run();
  CHECK(code->start(make_request(3)));
  CHECK(executing.empty());
}

TEST_CASE_METHOD(context_fixture, "the end of a context ends what it executes",
                 "[actors][context]") {
  CHECK_FALSE(code->start(make_request(3)));
  REQUIRE(executing.size() == 1);
  caf::anon_send_exit(ctx, caf::exit_reason::kill);
  sched.run();
  CHECK(executing.empty());
}
