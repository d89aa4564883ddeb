#include "tests/support/catch.hpp"

#include "actors/protocol/actor_scheduler.hpp"
#include "actors/protocol/actor_system.hpp"
#include "tests/support/error_of.hpp"
#include "transport/wait.hpp"

#include <caf/event_based_actor.hpp>
#include <caf/scoped_actor.hpp>
#include <caf/send.hpp>

#include <atomic>
#include <functional>
#include <thread>
#include <vector>

using namespace smp;

namespace {

caf::behavior run_what_comes(caf::event_based_actor*) {
  return {
    [](uint64_t x) { (*reinterpret_cast<std::function<void()>*>(x))(); },
  };
}

/// Runs what it is sent.
struct runner {
  explicit runner(actor_host& host)
    : hdl(host.get().system.spawn(run_what_comes)),
      next(host.get().system.spawn(run_what_comes)) {
    sync(host);
  }

  ~runner() {
    caf::anon_send_exit(hdl, caf::exit_reason::kill);
    caf::anon_send_exit(next, caf::exit_reason::kill);
  }

  void send(std::function<void()>& f) const {
    caf::anon_send(hdl, reinterpret_cast<uint64_t>(&f));
  }

  /// Waits until it is done with what was sent before, and has nothing to do:
  /// the one thread of the pool has gone on to the next actor.
  void sync(actor_host& host) const {
    std::function<void()> nothing = [] {};
    caf::scoped_actor self{host.get().system};
    for (auto& x : {hdl, next})
      self->request(x, caf::infinite, reinterpret_cast<uint64_t>(&nothing))
        .receive([] {}, [](const caf::error&) { FAIL("no answer"); });
  }

  caf::actor hdl;
  caf::actor next;
};

} // namespace

TEST_CASE("an actor runs on the thread whose scope woke it up",
          "[actors][scheduler]") {
  actor_host host;
  runner actor{host};
  std::thread::id where;
  std::function<void()> note = [&] { where = std::this_thread::get_id(); };
  {
    run_here scope;
    actor.send(note);
    CHECK(where == std::thread::id{}); // not before the scope ends
  }
  CHECK(where == std::this_thread::get_id());
  actor.send(note);
  actor.sync(host);
  CHECK(where != std::this_thread::get_id());
}

TEST_CASE("no handler waits, whatever its thread may do else",
          "[actors][scheduler]") {
  struct : waiter {
    void wait(const completion_ptr&, const wait_reason&) override {
      ++waits;
    }
    int waits = 0;
  } own;
  scoped_waiter installed{own};
  actor_host host;
  runner actor{host};
  std::string text;
  auto wait = [] {
    waiter::current().wait(std::make_shared<completion>(), {"nothing", {}});
  };
  std::function<void()> handler = [&] { text = test::error_of(wait); };
  {
    run_here scope;
    actor.send(handler);
  }
  CHECK(text
        == "nothing is waited for on a thread of the actors, which must not "
           "wait: use it on a thread of your own");
  CHECK(own.waits == 0);
  wait();
  CHECK(own.waits == 1);
}

TEST_CASE("what an actor wakes up in turn is left to the pool",
          "[actors][scheduler]") {
  actor_host host;
  runner actor{host};
  runner other{host};
  std::thread::id where;
  std::function<void()> note = [&] { where = std::this_thread::get_id(); };
  std::function<void()> pass = [&] {
    run_here inner;
    other.send(note);
  };
  {
    run_here scope;
    actor.send(pass);
  }
  other.sync(host);
  CHECK(where != std::thread::id{});
  CHECK(where != std::this_thread::get_id());
}

TEST_CASE("a scope within a scope leaves its actors to the outer one",
          "[actors][scheduler]") {
  actor_host host;
  runner actor{host};
  bool ran = false;
  std::function<void()> note = [&] { ran = true; };
  {
    run_here outer;
    {
      run_here inner;
      actor.send(note);
    }
    CHECK_FALSE(ran);
  }
  CHECK(ran);
}

TEST_CASE("an actor that has much to do goes on in the pool",
          "[actors][scheduler]") {
  actor_host host;
  runner actor{host};
  auto mine = std::this_thread::get_id();
  int here = 0;
  int elsewhere = 0;
  std::function<void()> note = [&] {
    ++(std::this_thread::get_id() == mine ? here : elsewhere);
  };
  {
    run_here scope;
    for (int i = 0; i < 100; ++i)
      actor.send(note);
  }
  actor.sync(host);
  CHECK(here > 0);
  CHECK(elsewhere > 0);
  CHECK(here + elsewhere == 100);
}

TEST_CASE("no message is lost or doubled when many threads run an actor",
          "[actors][scheduler]") {
  actor_host host;
  runner actor{host};
  uint64_t count = 0; // an actor handles one message at a time
  std::function<void()> add = [&] { ++count; };
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i)
    threads.emplace_back([&, helps = i % 2 == 0] {
      for (int k = 0; k < 5000; ++k) {
        if (helps) {
          run_here scope;
          actor.send(add);
        } else {
          actor.send(add);
        }
      }
    });
  for (auto& x : threads)
    x.join();
  actor.sync(host);
  CHECK(count == 20000);
}
