#include "tests/support/catch.hpp"

#include "actors/cluster/member.hpp"
#include "actors/cluster/supervisor.hpp"
#include "actors/stalls/stall_monitor.hpp"
#include "tests/support/actors/actor_fixture.hpp"

#include <caf/event_based_actor.hpp>

#include <algorithm>
#include <chrono>
#include <memory>
#include <string>
#include <vector>

using namespace smp;
using namespace std::chrono_literals;

namespace {

using failures = std::vector<failure>;

/// SUPERVISOR and MEMBERs in one system, with simulated time.
struct run_fixture : actor_fixture {
  void init(uint64_t world_size) {
    supervisor_host::options x;
    x.world_size = world_size;
    x.run_id = "a run";
    x.on_rank_down = [this](const failure& y) { heard.push_back(y); };
    if (told)
      x.stalls = {.timeout = 3, .end = ends};
    x.join_limit = join_limit;
    x.on_stall = [this](const stall_report& y) { stalls.push_back(y); };
    boss = own(sys.spawn(supervisor, std::move(x)));
    ranks.resize(world_size);
    sched.run();
  }

  struct rank_entry {
    member_actor ear;
    std::shared_ptr<awaited<welcome>> joined;
    failures heard;
  };

  void join(uint64_t rank) {
    auto& x = ranks[rank];
    x.joined = std::make_shared<awaited<welcome>>();
    member_config cfg;
    cfg.me.rank = rank_id{rank};
    cfg.me.run_id = "a run";
    if (rank == 0)
      cfg.me.stalls = {.timeout = 5, .end = true};
    cfg.supervisor = boss;
    cfg.join_limit = join_limit;
    cfg.address = "there";
    cfg.on_rank_down = [&x](const failure& y) { x.heard.push_back(y); };
    cfg.joined = x.joined;
    x.ear = own(sys.spawn(member_ear, std::move(cfg)));
    sched.run();
  }

  void join_all() {
    for (uint64_t i = 0; i < ranks.size(); ++i)
      join(i);
  }

  void kill(uint64_t rank) {
    caf::anon_send_exit(ranks[rank].ear, caf::exit_reason::kill);
    sched.run();
  }

  void pass(std::chrono::milliseconds x) {
    sched.advance_time(x);
    sched.run();
  }

  supervisor_status status() {
    return ask<supervisor_status>(boss, status_atom_v);
  }

  bool alive() {
    return !ask_error(boss, goodbye_atom_v, rank_id{99});
  }

  bool told = true;
  bool ends = false;
  std::chrono::milliseconds join_limit = 30s;
  supervisor_actor boss;
  std::vector<rank_entry> ranks;
  failures heard;
  std::vector<stall_report> stalls;
};

failure killed(uint64_t rank) {
  return {error_code::rank_down, rank_id{rank}, {}, "killed by signal 9"};
}

} // namespace

TEST_CASE_METHOD(run_fixture, "all are welcome once all are there",
                 "[actors][supervisor]") {
  init(2);
  join(1);
  CHECK_FALSE(ranks[1].joined->done());
  CHECK(status().present == std::vector<rank_id>{rank_id{1}});
  join(0);
  for (auto& x : ranks) {
    CHECK(x.joined->done());
    CHECK_FALSE(x.joined->cause());
  }
}

TEST_CASE_METHOD(run_fixture, "supervisor and members answer status",
                 "[actors][supervisor]") {
  init(3);
  join_all();
  caf::anon_send(boss, goodbye_atom_v, rank_id{0});
  caf::anon_send(boss, down_atom_v, killed(1));
  auto x = status();
  CHECK(x.world_size == 3);
  CHECK(x.present == std::vector<rank_id>{rank_id{2}});
  CHECK(x.gone == std::vector<rank_id>{rank_id{0}});
  CHECK(x.losses == failures{killed(1)});
  auto y = ask<member_status>(ranks[2].ear, status_atom_v);
  CHECK(y.rank == rank_id{2});
  CHECK(y.losses == failures{killed(1)});
}

namespace {

inspector_actor::behavior_type noting_inspector(inspector_actor::pointer,
                                                std::vector<rank_id>* ranks,
                                                int* monitors) {
  return {
    [=](rank_id x, const rank_watch_actor&) { ranks->push_back(x); },
    [=](const stall_monitor_actor&) { ++*monitors; },
    [](inspect_atom) { return run_status{}; },
    [](const flight_query&) { return std::vector<std::string>{}; },
  };
}

} // namespace

TEST_CASE_METHOD(run_fixture, "an INSPECTOR hears of all that can be watched",
                 "[actors][supervisor]") {
  init(2);
  join_all();
  auto watch = [this](uint64_t rank) {
    watched_rank none;
    none.look = [] { return uint64_t{0}; };
    none.view = [] { return rank_view{}; };
    self->send(boss, rank_id{rank}, own(sys.spawn(rank_watch, none)));
    sched.run();
  };
  std::vector<rank_id> heard_of;
  int monitors = 0;
  watch(1);
  auto inspector = own(sys.spawn(noting_inspector, &heard_of, &monitors));
  self->send(boss, inspector);
  sched.run();
  CHECK(heard_of == std::vector<rank_id>{rank_id{1}}); // also what was before
  watch(0);
  CHECK(heard_of == std::vector<rank_id>{rank_id{1}, rank_id{0}});
  CHECK(monitors == 1);
}

TEST_CASE_METHOD(run_fixture, "a broken connection waits for a better cause",
                 "[actors][supervisor]") {
  init(3);
  join_all();
  kill(1);
  pass(999ms);
  CHECK(heard.empty());
  SECTION("that comes") {
    caf::anon_send(boss, down_atom_v, killed(1));
    sched.run();
    CHECK(ranks[0].heard == failures{killed(1)});
    CHECK(ranks[2].heard == failures{killed(1)});
    pass(1s);
    CHECK(heard == failures{killed(1)});
  }
  SECTION("that does not come") {
    pass(1ms);
    REQUIRE(heard.size() == 1);
    CHECK(heard[0].rank == rank_id{1});
    CHECK(ranks[0].heard == heard);
    CHECK(ranks[2].heard == heard);
  }
}

TEST_CASE_METHOD(run_fixture, "each loss is told once, the first one first",
                 "[actors][supervisor]") {
  init(3);
  join_all();
  caf::anon_send(boss, down_atom_v, killed(2));
  caf::anon_send(boss, down_atom_v, killed(2));
  caf::anon_send(boss, down_atom_v, killed(1));
  sched.run();
  CHECK(ranks[0].heard == failures{killed(2), killed(1)});
  CHECK(heard == failures{killed(2), killed(1)});
}

TEST_CASE_METHOD(run_fixture,
                 "the end of a rank that said goodbye is not a loss",
                 "[actors][supervisor]") {
  init(2);
  join_all();
  CHECK_FALSE(ask_error(boss, goodbye_atom_v, rank_id{1}));
  kill(1);
  pass(1s);
  CHECK(heard.empty());
  CHECK(ranks[0].heard.empty());
}

TEST_CASE_METHOD(run_fixture, "a rank that joins too late hears the cause",
                 "[actors][supervisor]") {
  init(2);
  join(0);
  pass(30s);
  CHECK_THAT(ranks[0].joined->cause().text,
             Catch::Matchers::ContainsSubstring("rank 1 did not join"));
  join(1);
  CHECK(ranks[1].joined->cause() == ranks[0].joined->cause());
}

TEST_CASE_METHOD(run_fixture, "a member that waits to join gives up by itself",
                 "[actors][supervisor]") {
  SECTION("when the supervisor dies") {
    init(2);
    join(0);
    caf::anon_send_exit(boss, caf::exit_reason::kill);
    sched.run();
  }
  SECTION("when the supervisor does not answer") {
    init(2);
    auto mute = own(sys.spawn([](caf::event_based_actor* self) {
      self->set_default_handler(caf::skip);
      return caf::behavior{[](int) {}};
    }));
    boss = caf::actor_cast<supervisor_actor>(mute);
    join(0);
    pass(31s);
    CHECK_FALSE(ranks[0].joined->done());
    pass(1s);
  }
  CHECK_THAT(ranks[0].joined->cause().text,
             Catch::Matchers::ContainsSubstring("the SUPERVISOR at there"));
}

TEST_CASE_METHOD(run_fixture,
                 "the loss of the supervisor is not a loss for those"
                 " who leave",
                 "[actors][supervisor]") {
  init(2);
  join_all();
  caf::anon_send(ranks[0].ear, goodbye_atom_v);
  sched.run();
  caf::anon_send_exit(boss, caf::exit_reason::kill);
  sched.run();
  CHECK(ranks[0].heard.empty());
  REQUIRE(ranks[1].heard.size() == 1);
  CHECK_THAT(ranks[1].heard[0].text,
             Catch::Matchers::ContainsSubstring("is lost"));
}

TEST_CASE_METHOD(run_fixture, "a supervisor that ends waits for goodbyes",
                 "[actors][supervisor]") {
  init(2);
  join_all();
  caf::anon_send_exit(boss, caf::exit_reason::user_shutdown);
  sched.run();
  SECTION("until all said it") {
    CHECK_FALSE(ask_error(boss, goodbye_atom_v, rank_id{0}));
    CHECK(alive());
    CHECK_FALSE(ask_error(boss, goodbye_atom_v, rank_id{1}));
  }
  SECTION("but not for ever") {
    pass(1999ms);
    CHECK(alive());
    pass(1ms);
  }
  SECTION("but not after a loss") {
    caf::anon_send(boss, down_atom_v, killed(1));
    sched.run();
  }
  CHECK_FALSE(alive());
}

// A process that ends takes along what it has not written yet: the ranks would
// see a loss instead of the reason.
TEST_CASE_METHOD(run_fixture,
                 "who joins in vain has heard why before the SUPERVISOR ends",
                 "[actors][membership]") {
  init(3);
  join(0);
  auto first = ranks[0].ear;
  join(0); // claims a place that is taken
  caf::anon_send_exit(boss, caf::exit_reason::user_shutdown);
  sched.run();
  CHECK(alive());
  SECTION("that is, until they are gone") {
    caf::anon_send_exit(first, caf::exit_reason::kill);
    sched.run();
    CHECK(alive());
    kill(0);
    CHECK_FALSE(alive());
  }
  SECTION("but not for ever") {
    pass(2s);
    CHECK_FALSE(alive());
  }
}

TEST_CASE_METHOD(run_fixture,
                 "a rank that is stopped before all joined is a stall",
                 "[actors][supervisor][R7]") {
  init(2);
  join(0);
  caf::anon_send(boss, stall_atom_v, rank_id{1}, true);
  sched.run();
  pass(2900ms);
  CHECK(stalls.empty());
  pass(100ms);
  REQUIRE(stalls.size() == 1);
  CHECK(
    stalls[0].text
    == "rank 1 has been stopped by a signal for 3.0 s, before all ranks "
       "joined");
  CHECK(stalls[0].culprit == rank_id{1});
  CHECK_FALSE(stalls[0].ends);
  CHECK_FALSE(stalls[0].ranks_know);
  pass(2900ms);
  CHECK(stalls.size() == 1);
  pass(100ms);
  CHECK(stalls.size() == 2);
  CHECK(heard.empty());
}

TEST_CASE_METHOD(run_fixture,
                 "what is a stall says rank 0 where nobody said it before",
                 "[actors][supervisor]") {
  told = GENERATE(true, false);
  CAPTURE(told);
  init(3);
  join(0);
  join(1);
  caf::anon_send(boss, stall_atom_v, rank_id{1}, true);
  sched.run();
  pass(4s);
  CHECK(stalls.size() == (told ? 1u : 0u));
  pass(1s);
  REQUIRE(stalls.size() == 1);
  CHECK(stalls[0].ends == !told);
}

TEST_CASE_METHOD(run_fixture, "a rank that goes on in time is not a stall",
                 "[actors][supervisor][R7]") {
  init(2);
  join(0);
  caf::anon_send(boss, stall_atom_v, rank_id{1}, true);
  sched.run();
  pass(1s);
  CHECK(status().stopped == std::vector<rank_id>{rank_id{1}});
  caf::anon_send(boss, stall_atom_v, rank_id{1}, false);
  pass(10s);
  CHECK(status().stopped.empty());
  CHECK(stalls.empty());
}

TEST_CASE_METHOD(run_fixture,
                 "a rank that is stopped on its way out is a stall, and while "
                 "a STALL MONITOR looks it is that one's",
                 "[actors][supervisor][R7]") {
  init(2);
  join_all();
  for (uint64_t i : {0, 1}) {
    watched_rank none;
    none.look = [] { return uint64_t{0}; };
    none.view = [] { return rank_view{}; };
    self->send(boss, rank_id{i}, own(sys.spawn(rank_watch, none)));
  }
  caf::anon_send(boss, stall_atom_v, rank_id{1}, true);
  sched.run();
  auto by_supervisor = [this] {
    return std::count_if(stalls.begin(), stalls.end(),
                         [](auto& x) { return !x.ranks_know; });
  };
  pass(4s);
  CHECK(by_supervisor() == 0);
  caf::anon_send(boss, goodbye_atom_v, rank_id{0});
  pass(3s); // one look was at 4 s
  REQUIRE(by_supervisor() == 1);
  CHECK(stalls.back().text
        == "rank 1 has been stopped by a signal for 7.0 s, and others have "
           "left the run");
}

TEST_CASE_METHOD(run_fixture,
                 "ranks that do not join are named once, long before the run "
                 "gives them up",
                 "[actors][supervisor][R7]") {
  join_limit = 300s;
  init(4);
  join(3);
  pass(20s);
  join(0); // that is progress
  pass(29900ms);
  CHECK(stalls.empty());
  pass(200ms);
  REQUIRE(stalls.size() == 1);
  CHECK(stalls[0].text
        == "ranks 1, 2 have not joined, and nobody has for 30.1 s: their "
           "processes have not begun yet, are stopped, or do not reach the "
           "SUPERVISOR; the run waits for 300 s in all");
  CHECK(stalls[0].silent == std::vector{rank_id{1}, rank_id{2}});
  CHECK_FALSE(stalls[0].ends);
  CHECK_FALSE(stalls[0].ranks_know);
  join(1);
  pass(100s);
  CHECK(stalls.size() == 1);
  CHECK(heard.empty());
  join(2);
  CHECK_FALSE(ranks[2].joined->cause());
}

TEST_CASE_METHOD(run_fixture,
                 "a rank that does not join ends the run where that is asked "
                 "for, unless it is known to be stopped",
                 "[actors][supervisor][R7]") {
  join_limit = 300s;
  ends = true;
  init(2);
  join(0);
  SECTION("and says so to those that wait") {
    pass(31s);
    REQUIRE(stalls.size() == 1);
    CHECK(stalls[0].ends);
    CHECK(ranks[0].joined->cause().code == error_code::stalled);
    CHECK_THAT(ranks[0].joined->cause().text,
               Catch::Matchers::StartsWith("rank 1 has not joined"));
  }
  SECTION("which is told as that") {
    pass(29s);
    caf::anon_send(boss, stall_atom_v, rank_id{1}, true);
    sched.run();
    pass(2s);
    CHECK(stalls.empty());
    pass(2s);
    REQUIRE(stalls.size() == 1);
    CHECK_THAT(stalls[0].text,
               Catch::Matchers::StartsWith("rank 1 has been stopped"));
  }
}

TEST_CASE_METHOD(run_fixture,
                 "where ranks have less time to join, its end names them",
                 "[actors][supervisor][R7]") {
  ends = true;
  init(2);
  join(0);
  pass(30s);
  CHECK(stalls.empty());
  CHECK_THAT(ranks[0].joined->cause().text,
             Catch::Matchers::StartsWith("rank 1 did not join"));
}
