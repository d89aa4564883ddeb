// ctest: label=multiprocess
#include "tests/support/catch.hpp"

#include "runtime/launch/process_group.hpp"
#include "tests/support/best_of.hpp"
#include "tests/support/runs/signpost.hpp"
#include "tests/support/scratch_dir.hpp"

#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

using namespace smp;
using namespace smp::test;
using namespace std::chrono_literals;

using Catch::Matchers::ContainsSubstring;

namespace {

using clock_type = std::chrono::steady_clock;

/// Waits until it is killed. The shell's own loop would be killed with less.
constexpr const char* forever = "exec tail -f /dev/null";

/// Ranks that are shell scripts; $R is the rank, $DIR the test's directory.
class shell_run {
public:
  explicit shell_run(const std::string& script, uint64_t size = 2) {
    options.command = {"sh", "-c", script};
    options.size = size;
    options.log_dir = dir.path / "logs";
  }

  process_group::result
  run(const std::function<void(process_group&)>& started = nullptr) {
    process_group group{options};
    group.start([this](uint64_t rank) {
      return std::map<std::string, std::string>{{"R", std::to_string(rank)},
                                                {"DIR", dir.path.string()}};
    });
    if (started)
      started(group);
    auto result = group.run();
    for (auto pid : group.pids()) {
      // Neither the rank nor anything else in its process group is left.
      CHECK(::kill(-pid, 0) == -1);
      CHECK(errno == ESRCH);
    }
    return result;
  }

  std::string log(uint64_t rank) const {
    return dir.read("logs/log-" + std::to_string(rank) + ".txt");
  }

  scratch_dir dir;
  process_group::options options;
};

} // namespace

// -- ends ---------------------------------------------------------------------

TEST_CASE("a process that failed may be started again in its place",
          "[runtime][launch]") {
  // For good, or until the others have ended, or all are interrupted.
  shell_run x{
    "[ $R = 0 ] && { while [ ! -e $DIR/end ]; do sleep 0.01; done; "
    "exit 0; }; [ -e $DIR/2 ] && { touch $DIR/end; exit 0; }; "
    "[ -e $DIR/1 ] && touch $DIR/2; touch $DIR/1; exit 9"};
  auto wait = GENERATE(0ms, 1h);
  x.options.again_after = [&](rank_id y, const process_end& end) {
    CHECK((y == rank_id{1} && end.code == 9));
    if (wait > 0ms)
      x.dir.write("end", "");
    return std::optional{std::chrono::milliseconds{wait}};
  };
  auto result = x.run();
  CHECK(!result.cause);
  CHECK(result.code == 0);
}

TEST_CASE("processes that all end well leave no cause", "[runtime][launch]") {
  shell_run x{"echo rank $R", 3};
  auto result = x.run();
  CHECK_FALSE(result.cause);
  CHECK_FALSE(result.interrupted);
  CHECK(x.log(0) == "rank 0\n");
  CHECK(x.log(2) == "rank 2\n");
}

TEST_CASE("the first process that fails is the cause and ends the others",
          "[runtime][launch]") {
  auto took = best_of<clock_type::duration>(3, 2s, [] {
    shell_run x{
      std::string{"if [ $R = 1 ]; then echo no luck >&2; exit 7; fi; "}
      + forever};
    std::vector<std::string> reported;
    x.options.on_failure = [&](const failure& f) {
      reported.push_back(f.describe());
    };
    auto begin = clock_type::now();
    auto result = x.run();
    auto end = clock_type::now();
    CHECK(result.cause.describe() == "rank 1: exited with code 7");
    CHECK(result.code == 7);
    CHECK(result.last_words == "no luck");
    CHECK(reported == std::vector<std::string>{"rank 1: exited with code 7"});
    return end - begin;
  });
  CHECK(took < 2s);
}

TEST_CASE("last words may end as lines do that are overwritten",
          "[runtime][launch]") {
  shell_run x{
    std::string{"if [ $R = 1 ]; then printf 'step 1\\rno luck\\r\\n\\r\\n' "
                ">&2; exit 7; fi; "}
    + forever};
  CHECK(x.run().last_words == "no luck");
}

TEST_CASE(
  "a killed process is named with its signal, and no one survives it "
  "by 2 s",
  "[runtime][launch]") {
  // It takes 1.5 s, and a busy machine some of the rest.
  auto took = best_of<clock_type::duration>(5, 2s, [] {
    // Rank 0 has a child of its own and takes no SIGTERM.
    shell_run x{std::string{"trap '' TERM; echo >$DIR/ready; tail -f /dev/null "
                            "& "}
                + forever};
    signpost ready{x.dir, "ready"};
    clock_type::time_point killed;
    auto result = x.run([&](process_group& group) {
      ready.wait_for(2);
      killed = clock_type::now();
      ::kill(group.pids()[1], SIGKILL);
    });
    auto end = clock_type::now();
    CHECK(result.cause.code == error_code::rank_down);
    CHECK(result.cause.describe() == "rank 1: killed by signal 9 (SIGKILL)");
    CHECK(result.code == 0);
    return end - killed;
  });
  CHECK(took < 2s);
}

TEST_CASE("a rank that only noticed the loss of another is not the cause",
          "[runtime][launch]") {
  // Rank 0 exits with 3 when the other is dead, or shortly before.
  shell_run x{
    "if [ $R = 1 ]; then echo $$ >$DIR/pid; echo >$DIR/ready; "
    "exec tail -f /dev/null; fi; read x <$DIR/go; exit 3"};
  x.options.grace = 20s; // both end by themselves, however late
  x.options.why_killed = [] { return std::string{", as told"}; };
  signpost ready{x.dir, "ready"};
  signpost go{x.dir, "go"};
  std::vector<failure> reported;
  x.options.on_failure = [&](const failure& f) {
    reported.push_back(f);
    if (f.rank == rank_id{0})
      ::kill(std::stoi(x.dir.read("pid")), SIGKILL);
  };
  auto result = x.run([&](process_group&) {
    ready.wait_for(1);
    x.dir.write("go", "\n");
  });
  REQUIRE(reported.size() == 2);
  CHECK(reported[0].describe() == "rank 0: exited with code 3");
  CHECK(result.cause.describe()
        == "rank 1: killed by signal 9 (SIGKILL), as told");
}

TEST_CASE("a killed rank is reported before those that noticed it",
          "[runtime][launch]") {
  // Rank 1 dies when nothing is left of rank 0, whatever that was about.
  shell_run x{
    "if [ $R = 0 ]; then echo $$ >$DIR/pid; exit 3; fi; "
    "until [ -s $DIR/pid ] && ! kill -0 $(cat $DIR/pid); do :; done "
    "2>/dev/null; kill -KILL $$"};
  x.options.second_hand = 1min;
  x.options.grace = 20s; // both end by themselves, however late
  std::vector<std::string> reported;
  x.options.on_failure = [&](const failure& f) {
    reported.push_back(f.describe());
  };
  x.run();
  CHECK(reported
        == std::vector<std::string>{"rank 1: killed by signal 9 (SIGKILL)",
                                    "rank 0: exited with code 3"});
}

TEST_CASE(
  "another witness's report ends the run, and the process's own end "
  "says more",
  "[runtime][launch]") {
  shell_run silent{forever};
  failure lost{error_code::rank_down, rank_id{1}, {}, "connection lost"};
  auto result = silent.run([&](process_group& group) { group.report(lost); });
  CHECK(result.cause == lost);
  shell_run x{
    "if [ $R = 1 ]; then read x <$DIR/go; kill -SEGV $$; fi; "
    "exec tail -f /dev/null"};
  x.options.grace = 8s; // a quarter of it for the signal
  signpost go{x.dir, "go"};
  x.options.on_failure = [&](const failure& f) {
    if (f == lost)
      x.dir.write("go", "\n");
  };
  result = x.run([&](process_group& group) { group.report(lost); });
  CHECK(result.cause.describe() == "rank 1: killed by signal 11 (SIGSEGV)");
}

TEST_CASE(
  "a rank that ends well before the others is the cause if others say so",
  "[runtime][launch]") {
  // Rank 1 is gone before rank 0 notices, and its report comes at last.
  shell_run x{"if [ $R = 1 ]; then exit 0; fi; read x <$DIR/go; exit 3"};
  signpost go{x.dir, "go"};
  process_group* group = nullptr;
  const std::string early = "rank 1: ended with code 0 before the others";
  x.options.on_result = [&](const failure& f) {
    x.dir.write("go", f.describe() == early ? "\n" : "");
  };
  const bool left_early = GENERATE(true, false);
  x.options.on_failure = [&](const failure& f) {
    if (f.rank == rank_id{0} && left_early)
      group->report({error_code::rank_down, rank_id{1}, {}, "lost"});
  };
  auto result = x.run([&](process_group& y) { group = &y; });
  CHECK(result.cause.describe()
        == (left_early ? early : "rank 0: exited with code 3"));
  CHECK(result.early == (left_early ? std::optional{0} : std::nullopt));
  CHECK_FALSE(result.told_by_rank_0); // nobody said why
}

TEST_CASE("a rank that says that it only heard of a loss is not the cause",
          "[runtime][launch]") {
  shell_run x{
    "if [ $R = 1 ]; then read x <$DIR/go; echo no luck >&2; exit 3; fi; "
    "printf '0 h \\0' >/proc/self/fd/$SMP_UNWRITTEN_WORDS; exit 3"};
  signpost go{x.dir, "go"};
  x.options.grace = 20s;
  x.options.on_failure = [&](const failure& f) {
    if (f.rank == rank_id{0})
      x.dir.write("go", "\n");
  };
  auto result = x.run();
  CHECK(result.cause.describe() == "rank 1: exited with code 3");
  CHECK(result.last_words == "no luck");
}

TEST_CASE("what rank 0 told is the cause, for who asks later",
          "[runtime][launch]") {
  shell_run x{
    "[ $R = 0 ] && printf '0 t rank 1: no luck\\nat all\\0' "
    ">/proc/self/fd/$SMP_UNWRITTEN_WORDS; exit 3"};
  x.options.grace = 20s;
  auto result = x.run();
  CHECK(result.told_by_rank_0);
  CHECK(result.last_words == "rank 1: no luck");
}

TEST_CASE("a verdict that rank 0 told is not told again, however it ends",
          "[runtime][launch]") {
  // Too busy to exit in time.
  shell_run x{std::string{"trap '' TERM; [ $R = 0 ] && echo smp: all wait >&2; "
                          "echo >$DIR/ready; "}
              + forever};
  x.options.grace = 200ms;
  signpost ready{x.dir, "ready"};
  auto text = GENERATE(as<std::string>{}, "all wait", "nobody waits");
  auto result = x.run([&](process_group& group) {
    ready.wait_for(2);
    group.end({error_code::stalled, no_rank, {}, text}, 4);
  });
  CHECK(result.code == 4);
  CHECK(result.cause.text == text);
  CHECK(result.told_by_rank_0 == (text == "all wait"));
}

TEST_CASE("after a verdict no end of a rank is told as a cause",
          "[runtime][launch]") {
  shell_run x{"read x <$DIR/go; exit 4"};
  x.options.grace = 40s; // they end by themselves
  signpost go{x.dir, "go"};
  std::vector<std::string> told;
  x.options.on_failure = [&](const failure& f) {
    told.push_back(f.describe());
  };
  auto fd = ::open((x.dir.path / "go").c_str(), O_RDWR | O_CLOEXEC);
  auto result = x.run([&](process_group& group) {
    group.end({error_code::stalled, no_rank, {}, "all wait"}, 4);
    REQUIRE(::write(fd, "\n\n", 2) == 2);
  });
  ::close(fd);
  CHECK(result.code == 4);
  CHECK(result.cause.text == "all wait");
  CHECK(told == std::vector<std::string>{});
}

TEST_CASE("an error that rank 0 shows on the console is not told again",
          "[runtime][launch]") {
  shell_run x{"echo run.toml:3: unknown key >&2; exit 2"};
  x.options.grace = 20s; // one may end long after the other
  auto result = x.run();
  CHECK(result.code == 2);
  CHECK(result.last_words.empty());
}

TEST_CASE(
  "a command that cannot be started is a named error and starts "
  "nothing",
  "[runtime][launch]") {
  process_group::options options;
  options.command = {"no-such-program-of-smp"};
  process_group group{options};
  auto none = [](uint64_t) { return std::map<std::string, std::string>{}; };
  try {
    group.start(none);
    FAIL("no error");
  } catch (const error& e) {
    CHECK(e.code() == error_code::config);
    CHECK_THAT(e.what(), ContainsSubstring("no-such-program-of-smp: No such"));
  }
  CHECK(group.pids().empty());
  options.command = {"/etc/passwd"};
  process_group other{options};
  try {
    other.start(none);
    FAIL("no error");
  } catch (const error& e) {
    CHECK_THAT(e.what(), ContainsSubstring("/etc/passwd: Permission denied"));
  }
}

// -- interrupts ---------------------------------------------------------------

TEST_CASE("an interrupt is passed on once and waits for a clean end",
          "[runtime][launch]") {
  shell_run x{
    "trap 'echo ending; exit 130' INT; tail -f /dev/null & "
    "echo >$DIR/ready; wait"};
  signpost ready{x.dir, "ready"};
  auto result = x.run([&](process_group&) {
    ready.wait_for(2);
    ::kill(::getpid(), SIGINT);
  });
  CHECK(result.interrupted);
  CHECK_FALSE(result.cause);
  CHECK(x.log(0) == "ending\n");
  CHECK(x.log(1) == "ending\n");
}

TEST_CASE("a second interrupt ends processes that do not end by themselves",
          "[runtime][launch]") {
  shell_run x{
    "trap 'echo >$DIR/caught' INT; trap '' TERM; "
    "tail -f /dev/null & echo >$DIR/ready; wait; wait"};
  signpost ready{x.dir, "ready"};
  signpost caught{x.dir, "caught"};
  std::thread user;
  auto begin = clock_type::now();
  auto result = x.run([&](process_group&) {
    ready.wait_for(2);
    user = std::thread{[&] {
      ::kill(::getpid(), SIGINT);
      caught.wait_for(2);
      ::kill(::getpid(), SIGINT);
    }};
  });
  user.join();
  CHECK(result.interrupted);
  CHECK_FALSE(result.cause);
  CHECK(clock_type::now() - begin < 10s); // not the 30 s of patience
}

TEST_CASE("patience after an interrupt has an end", "[runtime][launch]") {
  shell_run x{
    "trap '' INT; trap '' TERM; echo >$DIR/ready; "
    "exec tail -f /dev/null"};
  x.options.interrupt_grace = 50ms;
  x.options.grace = 100ms;
  signpost ready{x.dir, "ready"};
  auto result = x.run([&](process_group&) {
    ready.wait_for(2);
    ::kill(::getpid(), SIGINT);
  });
  CHECK(result.interrupted);
}

TEST_CASE("SIGUSR1 and SIGUSR2 reach processes, which may block one at first",
          "[runtime][launch]") {
  auto [number, name] = GENERATE(
    table<int, std::string>({{SIGUSR1, "USR1"}, {SIGUSR2, "USR2"}}));
  shell_run x{"trap 'exit 0' " + name
              + "; tail -f /dev/null & echo >$DIR/ready; wait"};
  signpost ready{x.dir, "ready"};
  auto result = x.run([&, number = number](process_group&) {
    ready.wait_for(2);
    ::kill(::getpid(), number);
  });
  CHECK_FALSE(result.cause);
  CHECK_FALSE(result.interrupted);
  shell_run y{"exec grep SigBlk /proc/self/status", 1};
  y.options.blocked_signal = number;
  y.run();
  CHECK(std::stoull(y.log(0).substr(y.log(0).find(':') + 1), nullptr, 16)
        == 1ull << (number - 1));
}

// -- orphans ------------------------------------------------------------------

TEST_CASE("processes die with a launcher that is killed", "[runtime][launch]") {
  scratch_dir dir;
  signpost ready{dir, "ready"};
  auto launcher = ::fork();
  if (launcher == 0) {
    process_group::options options;
    options.command = {"sh", "-c",
                       "trap '' TERM HUP; echo $$ >$DIR/pid-$R; "
                       "echo >$DIR/ready; exec tail -f /dev/null"};
    options.size = 2;
    process_group group{options};
    group.start([&](uint64_t rank) {
      return std::map<std::string, std::string>{{"R", std::to_string(rank)},
                                                {"DIR", dir.path.string()}};
    });
    group.run();
    ::_exit(0);
  }
  ready.wait_for(2);
  ::kill(launcher, SIGKILL);
  REQUIRE(::waitpid(launcher, nullptr, 0) == launcher);
  for (auto name : {"pid-0", "pid-1"})
    CHECK(ends_within(std::stoi(dir.read(name)), 2000ms));
}

TEST_CASE("what a rank started does not outlive it", "[runtime][launch]") {
  shell_run x{"tail -f /dev/null & echo $! >$DIR/pid-$R; exit 0"};
  auto result = x.run();
  CHECK_FALSE(result.cause);
  for (auto name : {"pid-0", "pid-1"})
    CHECK(ends_within(std::stoi(x.dir.read(name)), 2000ms));
}

TEST_CASE("a group that is given up takes its processes along",
          "[runtime][launch]") {
  std::vector<pid_t> pids;
  {
    process_group::options options;
    options.command = {"sh", "-c", std::string{"trap '' TERM; "} + forever};
    options.size = 2;
    process_group group{options};
    group.start([](uint64_t) { return std::map<std::string, std::string>{}; });
    pids = group.pids();
  }
  for (auto pid : pids)
    CHECK(::kill(-pid, 0) == -1);
}

TEST_CASE("a rank inherits no file, signal or terminal from its launcher",
          "[runtime][launch]") {
  auto leaked = ::open("/dev/null", O_RDONLY); // without O_CLOEXEC
  auto before = std::signal(SIGPIPE, SIG_IGN);
  shell_run x{
    "ls -l /proc/self/fd | grep -c ' -> '; cat; "
    "grep SigIgn /proc/$$/status; read a b c d group e </proc/$$/stat; "
    "echo $group $$",
    1};
  x.run();
  std::signal(SIGPIPE, before);
  ::close(leaked);
  std::istringstream log{x.log(0)};
  std::string files, name, ignored, group, pid;
  log >> files >> name >> ignored >> group >> pid;
  // stdin, stdout, stderr, the pipe of last words, the directory that ls reads
  CHECK(files == "5");
  CHECK(name == "SigIgn:");
  CHECK((std::stoull(ignored, nullptr, 16) >> (SIGPIPE - 1)) % 2 == 0);
  CHECK(group == pid);
}

// -- output -------------------------------------------------------------------

namespace {

/// A duplicate of `fd`, to restore it later. What the test program itself has
/// buffered goes out first: it must not turn up in what a test reads.
int saved_descriptor(int fd) {
  std::cout.flush();
  std::fflush(nullptr);
  return ::dup(fd);
}

} // namespace

TEST_CASE("rank 0 writes to the console and to its log, the others to theirs",
          "[runtime][launch]") {
  scratch_dir console;
  auto write_to = [](const std::string& path, int fd) {
    auto saved = saved_descriptor(fd);
    auto file = ::open(path.c_str(), O_WRONLY | O_CREAT, 0600);
    ::dup2(file, fd);
    ::close(file);
    return saved;
  };
  shell_run x{"echo out $R; printf 'step 1\\rstep 2\\r\\n' >&2; printf last"};
  auto out = write_to(console.path / "out", 1);
  auto err = write_to(console.path / "err", 2);
  auto result = x.run();
  ::dup2(out, 1);
  ::dup2(err, 2);
  ::close(out);
  ::close(err);
  CHECK_FALSE(result.cause);
  CHECK(console.read("out") == "out 0\nlast");
  CHECK(console.read("err") == "step 1\rstep 2\r\n");
  CHECK_THAT(x.log(0), ContainsSubstring("out 0\n"));
  // Of a line that was overwritten the log keeps the last text.
  CHECK_THAT(x.log(0), ContainsSubstring("step 2\n"));
  CHECK_THAT(x.log(0), !ContainsSubstring("step 1"));
  CHECK_THAT(x.log(0), ContainsSubstring("last"));
  CHECK(x.log(1) == "out 1\nstep 1\rstep 2\r\nlast");
}

TEST_CASE("much output arrives complete and in order", "[runtime][launch]") {
  scratch_dir console;
  auto path = (console.path / "out").string();
  auto saved = saved_descriptor(1);
  auto file = ::open(path.c_str(), O_WRONLY | O_CREAT, 0600);
  ::dup2(file, 1);
  ::close(file);
  shell_run x{"seq 1 200000", 1};
  x.run();
  ::dup2(saved, 1);
  ::close(saved);
  std::string wanted;
  for (int i = 1; i <= 200000; ++i)
    wanted += std::to_string(i) + "\n";
  CHECK(x.log(0) == wanted);
  CHECK(console.read("out") == wanted);
}

TEST_CASE(
  "a console that takes nothing does not keep the launcher from its "
  "work",
  "[runtime][launch]") {
  int ends[2];
  REQUIRE(::pipe2(ends, O_CLOEXEC) == 0); // nobody reads
  auto saved = saved_descriptor(1);
  ::dup2(ends[1], 1);
  shell_run x{
    "if [ $R = 1 ]; then read x <$DIR/go; kill -9 $$; fi; "
    "echo >$DIR/go; seq 1 1000000"};
  signpost go{x.dir, "go"};
  auto begin = clock_type::now();
  auto result = x.run();
  ::dup2(saved, 1);
  for (int fd : {saved, ends[0], ends[1]})
    ::close(fd);
  CHECK(result.cause.describe() == "rank 1: killed by signal 9 (SIGKILL)");
  CHECK(clock_type::now() - begin < 5s);
}

TEST_CASE("a console that has gone costs nothing but its view",
          "[runtime][launch]") {
  int ends[2];
  REQUIRE(::pipe2(ends, O_CLOEXEC) == 0);
  ::close(ends[0]); // the reader has left, as in "smp-train | head"
  auto saved = saved_descriptor(1);
  ::dup2(ends[1], 1);
  shell_run x{"seq 1 10000", 1};
  auto result = x.run();
  ::dup2(saved, 1);
  ::close(saved);
  ::close(ends[1]);
  CHECK_FALSE(result.cause);
  CHECK(x.log(0).ends_with("\n10000\n"));
}
