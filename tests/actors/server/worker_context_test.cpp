#include "tests/support/catch.hpp"

#include "actors/server/worker_context.hpp"
#include "tests/support/actor_fixture.hpp"
#include "tests/support/function_services.hpp"
#include "tests/support/scripted_executor.hpp"

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
    services.executor = factory({0});
    server = own(sys.spawn([this](caf::event_based_actor*) -> caf::behavior {
      return {
        [this](const suspended& x) { calls.push_back(x.what); },
        [this](const finished& x) { outcomes.push_back(x.result); },
      };
    }));
    ctx = own(sys.spawn(worker_context,
                        std::make_shared<context_notes>(context_id{9}),
                        caf::actor_cast<module_server_actor>(server),
                        static_cast<rank_services*>(&services)));
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
    caf::anon_send(ctx, make_request(3));
    sched.run();
    if (x == context_state::pending) {
      advance_one();
      sched.run();
    }
  }

  function_services services;
  caf::actor server;
  worker_context_actor ctx;
  std::vector<call> calls;
  std::vector<outcome> outcomes;
};

} // namespace

TEST_CASE_METHOD(context_fixture,
                 "a context goes through its states and tells them",
                 "[actors][context]") {
  CHECK(status().state == context_state::idle);
  caf::anon_send(ctx, make_request(3));
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
  caf::anon_send(ctx, response{{}, text_payload("y"), {}});
  CHECK(status().state == context_state::executing);
  advance_one();
  x = status();
  CHECK(x.state == context_state::idle);
  CHECK(x.served == 1);
  REQUIRE(outcomes.size() == 1);
  CHECK(text_of(outcomes[0].body) == "xy");
}

TEST_CASE_METHOD(context_fixture,
                 "a message that does not fit the state is refused",
                 "[actors][context]") {
  using enum context_state;
  auto state = GENERATE(idle, executing, pending);
  auto kind = GENERATE(0, 1, 2, 3);
  go_to(state);
  auto err = caf::error{};
  auto legal = false;
  switch (kind) {
    case 0:
      legal = state == idle;
      err = ask_error(ctx, make_request(3));
      break;
    case 1:
      legal = state == pending;
      err = ask_error(ctx, response{});
      break;
    case 2:
      legal = state == executing;
      err = ask_error(ctx, call{});
      break;
    default:
      legal = state == executing;
      err = ask_error(ctx, outcome{});
  }
  INFO("state " << to_string(state) << ", message " << kind);
  if (legal) {
    CHECK_FALSE(err);
  } else {
    CHECK(err == caf::sec::unexpected_message);
    CHECK(status().state == state);
  }
}

TEST_CASE_METHOD(context_fixture,
                 "an executor that throws ends its context with the text",
                 "[actors][context]") {
  self->monitor(ctx);
  caf::anon_send(ctx, make_request(4));
  sched.run();
  std::string reason;
  self->receive([&](caf::down_msg& x) { reason = to_string(x.reason); },
                caf::after(std::chrono::seconds(0)) >> [] {});
  CHECK_THAT(reason, Catch::Matchers::ContainsSubstring("bug"));
}
