#include "tests/support/catch.hpp"

#include "actors/inspection/inspector.hpp"
#include "tests/support/actors/actor_fixture.hpp"
#include "transport/process_state.hpp"

#include <caf/event_based_actor.hpp>
#include <caf/typed_response_promise.hpp>

#include <chrono>
#include <optional>

#include <unistd.h>

using namespace smp;
using namespace std::chrono_literals;

namespace {

/// How a RANK WATCH behaves in a test.
struct manners {
  bool silent = false;
  rank_status says;
  int asked = 0;
  std::vector<caf::typed_response_promise<rank_status>> owed;
  std::string events = "image of ";
};

rank_watch_actor::behavior_type
watch_with_manners(rank_watch_actor::pointer self, manners* how) {
  return {
    [](look_atom) { return uint64_t{0}; },
    // In these tests: answer now what you owe. (Only an actor that runs can.)
    [how](stall_atom, const std::string&) {
      for (auto& x : how->owed)
        x.deliver(how->says);
    },
    [](stall_atom, const failure&) {},
    [](stall_atom, const step_failed&) {},
    [](status_atom) { return rank_view{}; },
    [self, how](inspect_atom) -> caf::result<rank_status> {
      ++how->asked;
      if (how->silent)
        return how->owed.emplace_back(
          self->make_response_promise<rank_status>());
      return how->says;
    },
    [self, how](const flight_query& x) -> caf::result<std::string> {
      if (how->silent)
        return self->make_response_promise<std::string>();
      return how->events + std::to_string(x.limit);
    },
  };
}

/// A SUPERVISOR that was told of a rank that a signal stopped.
supervisor_actor::behavior_type told_supervisor(supervisor_actor::pointer,
                                                rank_id stopped) {
  return {
    [](const member&, const member_actor&) { return welcome{}; },
    [](rank_id, const rank_watch_actor&) {},
    [](const inspector_actor&) {},
    [](goodbye_atom, rank_id) {},
    [](down_atom, const failure&) {},
    [](goodbye_atom, const failure&) {},
    [](stall_atom, rank_id, bool) {},
    [](uint64_t, const launcher_link_actor&) {},
    [](again_atom, bool) { return std::vector<uint64_t>{}; },
    [](stall_atom, const failure&) {},
    [](stall_atom, rank_id) {},
    [](deadline_atom) {},
    [](deadline_atom, rank_id) {},
    [stopped](status_atom) {
      supervisor_status result;
      result.stopped = {stopped};
      return result;
    },
  };
}

/// An INSPECTOR of ranks that do as they are told.
struct inspection_fixture : actor_fixture {
  explicit inspection_fixture(uint64_t size,
                              std::optional<rank_id> stopped = {})
    : ranks(size) {
    inspector_config config;
    config.world_size = size;
    if (stopped)
      config.supervisor = own(sys.spawn(told_supervisor, *stopped));
    boss = own(sys.spawn(inspector, config));
    for (auto& x : ranks) {
      x.says.view.complete = true;
      x.says.pid = ::getpid();
      x.says.host = host_name();
    }
  }

  rank_watch_actor join(uint64_t rank) {
    auto hdl = own(sys.spawn(watch_with_manners, &ranks[rank]));
    caf::anon_send(boss, rank_id{rank}, hdl);
    sched.run();
    return hdl;
  }

  run_status look() {
    auto handle = self->request(boss, caf::infinite, inspect_atom_v);
    sched.run();
    // Whoever does not answer now will not within the limit.
    while (sched.trigger_timeout())
      sched.run();
    run_status result;
    handle.receive(
      [&](run_status& x) { result = std::move(x); },
      [](const caf::error& x) { throw std::runtime_error(to_string(x)); });
    return result;
  }

  std::vector<std::string> events(uint64_t limit) {
    auto handle = self->request(boss, caf::infinite,
                                flight_query{flight_query::kind::last, limit});
    sched.run();
    while (sched.trigger_timeout())
      sched.run();
    std::vector<std::string> result;
    handle.receive(
      [&](std::vector<std::string>& x) { result = std::move(x); },
      [](const caf::error& x) { throw std::runtime_error(to_string(x)); });
    return result;
  }

  inspector_actor boss;
  std::vector<manners> ranks;
};

} // namespace

TEST_CASE("A rank that does not answer is silent, and the others are told of",
          "[actors][inspection]") {
  inspection_fixture x{3};
  for (uint64_t i = 0; i < 3; ++i)
    x.join(i);
  CHECK(x.look().ranks[1].health == rank_health::well);
  x.ranks[1].silent = true;
  x.ranks[2].says.queue = 7;
  auto status = x.look();
  CHECK(status.ranks[0].health == rank_health::well);
  CHECK(status.ranks[1].health == rank_health::silent);
  CHECK(status.ranks[1].known); // what it said before
  CHECK(status.ranks[2].health == rank_health::well);
  CHECK(status.ranks[2].status.queue == 7);
}

TEST_CASE("A rank on another machine is stopped if the SUPERVISOR was told so",
          "[actors][inspection]") {
  inspection_fixture x{3, rank_id{1}};
  for (uint64_t i = 0; i < 3; ++i) {
    x.ranks[i].says.host = "elsewhere";
    x.join(i);
    x.ranks[i].silent = i > 0;
  }
  auto status = x.look();
  CHECK(status.ranks[0].health == rank_health::well);
  CHECK(status.ranks[1].health == rank_health::stopped);
  CHECK(status.ranks[2].health == rank_health::silent);
}

TEST_CASE("A rank that owes an answer is not asked again",
          "[actors][inspection]") {
  inspection_fixture x{2};
  x.join(0);
  auto watch = x.join(1);
  x.ranks[1].silent = true;
  x.look();
  auto before = x.ranks[1].asked;
  for (int i = 0; i < 5; ++i)
    CHECK(x.look().ranks[1].health == rank_health::silent);
  CHECK(x.ranks[1].asked == before);
  // It goes on.
  x.ranks[1].silent = false;
  caf::anon_send(watch, stall_atom_v, std::string{});
  x.sched.run();
  CHECK(x.look().ranks[1].health == rank_health::well);
  CHECK(x.ranks[1].asked == before + 1);
}

TEST_CASE("A rank whose actors do not answer is blocked",
          "[actors][inspection]") {
  inspection_fixture x{1};
  x.ranks[0].says.view.complete = false;
  x.join(0);
  CHECK(x.look().ranks[0].health == rank_health::blocked);
  x.ranks[0].says.view.left = true; // they are ending
  CHECK(x.look().ranks[0].health == rank_health::well);
}

TEST_CASE("A rank that is stopped before it came is told as stopped",
          "[actors][inspection]") {
  inspection_fixture x{3, rank_id{1}};
  x.join(0);
  auto status = x.look();
  CHECK(status.ranks[1].health == rank_health::stopped);
  CHECK_FALSE(status.ranks[1].why.empty());
  CHECK(status.ranks[2].health == rank_health::joining);
}

TEST_CASE("A rank that did not come is joining, one that ended is lost",
          "[actors][inspection]") {
  inspection_fixture x{3};
  auto watch = x.join(1);
  x.join(2);
  x.ranks[2].says.view.left = true;
  CHECK(x.look().ranks[0].health == rank_health::joining);
  CHECK_FALSE(x.look().ranks[0].known);
  caf::anon_send_exit(watch, caf::exit_reason::kill);
  x.sched.run();
  auto status = x.look();
  CHECK(status.ranks[1].health == rank_health::lost);
  CHECK(status.ranks[2].health == rank_health::well);
}

TEST_CASE("The INSPECTOR and the STALL MONITOR are told of, too",
          "[actors][inspection]") {
  inspection_fixture x{1};
  x.join(0);
  auto status = x.look();
  REQUIRE(status.actors.size() == 1);
  CHECK(status.actors[0].id == "inspector");
  CHECK(status.pid == ::getpid());
}

TEST_CASE("The events of those ranks that answer in time are given",
          "[actors][inspection]") {
  inspection_fixture x{3};
  CHECK(x.events(5).empty()); // none has joined
  for (uint64_t i = 0; i < 3; ++i)
    x.join(i);
  CHECK(x.events(5) == std::vector<std::string>(3, "image of 5"));
  x.ranks[1].silent = true;
  CHECK(x.events(6) == std::vector<std::string>(2, "image of 6"));
}
