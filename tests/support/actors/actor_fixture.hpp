#pragma once

// A deterministic actor system for tests: no threads, simulated time.

#include "actors/protocol/actor_system.hpp"
#include "actors/protocol/actors.hpp"

#include <caf/actor_system.hpp>
#include <caf/actor_system_config.hpp>
#include <caf/scheduler/test_coordinator.hpp>
#include <caf/scoped_actor.hpp>
#include <caf/send.hpp>

#include <stdexcept>
#include <utility>
#include <vector>

namespace smp {

struct test_config : caf::actor_system_config {
  test_config() {
    init_message_types();
    set("caf.scheduler.policy", "testing");
  }
};

class actor_fixture {
public:
  actor_fixture()
    : sys(config),
      sched(dynamic_cast<caf::scheduler::test_coordinator&>(sys.scheduler())),
      self(sys) {
    // nop
  }

  /// Ends what the test spawned, last one first: `~actor_system` waits for
  /// every actor, for ever.
  ~actor_fixture() {
    for (auto i = spawned.rbegin(); i != spawned.rend(); ++i)
      caf::anon_send_exit(*i, caf::exit_reason::kill);
    sched.run();
  }

  template <class Handle>
  Handle own(Handle hdl) {
    spawned.push_back(caf::actor_cast<caf::actor>(hdl));
    return hdl;
  }

  /// Sends a request, runs the actors, returns the reply.
  template <class T, class Handle, class... Ts>
  T ask(const Handle& hdl, Ts&&... xs) {
    auto handle = self->request(hdl, caf::infinite, std::forward<Ts>(xs)...);
    sched.run();
    T result;
    handle.receive(
      [&](T& x) { result = std::move(x); },
      [](const caf::error& x) { throw std::runtime_error(to_string(x)); });
    return result;
  }

  /// Like `ask` for a handler without a value. @returns its error or none.
  template <class Handle, class... Ts>
  caf::error ask_error(const Handle& hdl, Ts&&... xs) {
    auto handle = self->request(hdl, caf::infinite, std::forward<Ts>(xs)...);
    sched.run();
    caf::error result;
    handle.receive([] {}, [&](caf::error& x) { result = std::move(x); });
    return result;
  }

  test_config config;
  caf::actor_system sys;
  caf::scheduler::test_coordinator& sched;
  caf::scoped_actor self;
  std::vector<caf::actor> spawned;
};

} // namespace smp
