#include "tests/support/catch.hpp"

#include "actors/cluster/member.hpp"
#include "actors/stalls/stall_monitor.hpp"
#include "tests/support/actors/actor_fixture.hpp"
#include "transport/files/file_descriptor.hpp"

#include <chrono>
#include <csignal>
#include <memory>
#include <string>
#include <vector>

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

// A rank whose SUPERVISOR does not answer.

using namespace smp;
using namespace std::chrono_literals;

namespace {

using failures = std::vector<failure>;

/// Takes every rank in, beside `others`, and is stopped when `stopped` says so.
supervisor_actor::behavior_type mute_supervisor(supervisor_actor::pointer self,
                                                std::vector<member> others,
                                                const bool* stopped) {
  return {
    [=](const member& x, const member_actor&) {
      welcome result{others, {}};
      result.members.push_back(x);
      return result;
    },
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
    [=](status_atom) -> caf::result<supervisor_status> {
      if (*stopped)
        return self->make_response_promise<supervisor_status>();
      return supervisor_status{};
    },
  };
}

struct watched_supervisor : actor_fixture {
  void join(bool end) {
    boss = own(sys.spawn(mute_supervisor, others, &stopped));
    watched_rank mine;
    mine.look = [] { return uint64_t{0}; };
    mine.view = [] { return rank_view{}; };
    mine.report = [this](const std::string& x) { reports.push_back(x); };
    mine.end = [this](const failure& x) { ends.push_back(x); };
    member_config cfg;
    cfg.supervisor = boss;
    cfg.address = "there";
    cfg.on_rank_down = [this](const failure& x) { losses.push_back(x); };
    cfg.me.stalls = {.timeout = 3, .end = end};
    cfg.watch = own(sys.spawn(rank_watch, std::move(mine)));
    cfg.joined = std::make_shared<awaited<welcome>>();
    ear = own(sys.spawn(member_ear, std::move(cfg)));
    sched.run();
  }

  void pass(std::chrono::milliseconds x) {
    for (; x > 0ms; x -= 100ms) {
      sched.advance_time(100ms);
      sched.run();
    }
  }

  bool stopped = false;
  std::vector<member> others;
  supervisor_actor boss;
  member_actor ear;
  std::vector<std::string> reports;
  failures ends;
  failures losses;
};

/// A process that runs until it is told how to end, and that nobody looks
/// after then, as a child of a stopped launcher.
class neighbour {
public:
  neighbour() {
    int ends[2];
    REQUIRE(::pipe2(ends, O_CLOEXEC) == 0);
    pid_ = ::fork();
    told_.reset(ends[1]);
    file_descriptor read_end{ends[0]};
    if (pid_ != 0)
      return;
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    char code = 0;
    auto got = ::read(read_end.get(), &code, 1);
    ::_exit(got == 1 ? code : 99);
  }

  ~neighbour() {
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }

  neighbour(const neighbour&) = delete;
  neighbour& operator=(const neighbour&) = delete;

  member as_rank(uint64_t x, const std::string& machine = "") const {
    member result;
    result.rank = rank_id{x};
    result.pid = pid_;
    result.machine = machine;
    return result;
  }

  void exit(char code) const {
    REQUIRE(::write(told_.get(), &code, 1) == 1);
    wait();
  }

  void kill() const {
    ::kill(pid_, SIGKILL);
    wait();
  }

private:
  void wait() const {
    siginfo_t ignored{};
    REQUIRE(
      ::waitid(P_PID, static_cast<id_t>(pid_), &ignored, WEXITED | WNOWAIT)
      == 0);
  }

  pid_t pid_ = 0;
  file_descriptor told_;
};

} // namespace

TEST_CASE_METHOD(watched_supervisor,
                 "a SUPERVISOR that answers is never reported",
                 "[actors][membership]") {
  join(true);
  pass(60s);
  CHECK(reports.empty());
  CHECK(ends.empty());
}

TEST_CASE_METHOD(watched_supervisor,
                 "each rank tells once of a SUPERVISOR that does not answer",
                 "[actors][membership]") {
  join(false);
  pass(5s);
  stopped = true;
  pass(2500ms);
  CHECK(reports.empty());
  pass(60s);
  REQUIRE(reports.size() == 1);
  CHECK(reports[0].find("the SUPERVISOR at there has not answered for ")
        != std::string::npos);
  // A cut cable looks the same from here.
  CHECK(reports[0].ends_with("is stopped or out of reach"));
  CHECK(ends.empty());
}

TEST_CASE_METHOD(watched_supervisor,
                 "a SUPERVISOR that does not answer ends a rank that is to end",
                 "[actors][membership]") {
  join(true);
  stopped = true;
  pass(10s);
  CHECK(reports.empty());
  REQUIRE(ends.size() == 1);
  CHECK(ends[0].code == error_code::stalled);
}

TEST_CASE_METHOD(watched_supervisor,
                 "a rank that leaves does not wait for an answer",
                 "[actors][membership]") {
  join(true);
  stopped = true;
  self->send(ear, goodbye_atom_v);
  pass(10s);
  CHECK(ends.empty());
}

// Its parent is stopped and does not look after it, so that UCX takes it for
// alive, and the SUPERVISOR, which is stopped too, does not tell.
TEST_CASE_METHOD(watched_supervisor,
                 "a rank looks after its neighbours while nobody else does",
                 "[actors][membership]") {
  neighbour first;
  neighbour second;
  neighbour elsewhere;
  neighbour leaves;
  others = {first.as_rank(1), second.as_rank(2),
            elsewhere.as_rank(3, "another"), leaves.as_rank(4)};
  join(false);
  pass(5s);
  SECTION("in the order of causes and consequences") {
    stopped = true;
    pass(1s);
    elsewhere.kill();
    leaves.exit(0);
    first.exit(3);
    second.kill();
    CHECK(losses.empty());
    pass(1s);
    REQUIRE(losses.size() == 2);
    CHECK(
      losses[0]
      == failure{
        error_code::rank_down, rank_id{2}, {}, "killed by signal 9 (SIGKILL)"});
    CHECK(losses[1].rank == rank_id{1});
    CHECK(losses[1].text == "exited with code 3");
    pass(10s);
    CHECK(losses.size() == 2); // each once
  }
  SECTION("but leaves it to the SUPERVISOR while that answers") {
    first.kill();
    pass(10s);
    CHECK(losses.empty());
    stopped = true;
    pass(2s);
    CHECK(losses.size() == 1);
  }
}
