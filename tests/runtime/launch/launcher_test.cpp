// ctest: seconds=13 label=multiprocess
#include "tests/support/catch.hpp"

#include "actors/cluster/membership.hpp"
#include "runtime/launch/environment.hpp"
#include "runtime/launch/launcher.hpp"
#include "runtime/launch/secret_handover.hpp"
#include "tests/support/best_of.hpp"
#include "tests/support/runs/program.hpp"
#include "tests/support/scratch_dir.hpp"
#include "tests/support/stderr_to.hpp"
#include "transport/error.hpp"
#include "transport/files/file_descriptor.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <future>
#include <string>
#include <thread>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

using namespace smp;
using namespace smp::test;
using namespace std::chrono_literals;

using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::StartsWith;

namespace {

using clock_type = std::chrono::steady_clock;

struct launch_result {
  int code = 0;
  /// What the launcher and rank 0 wrote to stderr.
  std::string told;
};

/// Launches with logs in the test's directory, which ranks know as $DIR.
launch_result launch_in(const scratch_dir& dir, launch_options x) {
  x.log_dir = dir.path / "logs";
  x.environment["DIR"] = dir.path;
  launch_result result;
  {
    stderr_to file{dir.path / "stderr"};
    result.code = launch(x);
  }
  result.told = dir.read("stderr");
  return result;
}

launch_options ranks_of(uint64_t ranks, std::vector<std::string> command) {
  launch_options result;
  result.ranks = ranks;
  result.command = std::move(command);
  return result;
}

launch_options shell(const std::string& script) {
  return ranks_of(2, {"sh", "-c", script});
}

std::string directory() {
  return std::getenv("DIR");
}

/// Fails the test unless `told` says that rank 1 is stopped, and what `follows`
/// that. @returns since how many seconds
double stopped_since(const std::string& told, const std::string& follows) {
  const std::string before = "smp: rank 1 has been stopped by a signal for ";
  INFO(told);
  auto at = told.find(before);
  REQUIRE(at != std::string::npos);
  size_t digits = 0;
  auto rest = told.substr(at + before.size());
  auto result = std::stod(rest, &digits);
  CHECK_THAT(rest.substr(digits), StartsWith(" s, " + follows));
  return result;
}

void make_pipe(const scratch_dir& dir, const char* name) {
  REQUIRE(::mkfifo((dir.path / name).c_str(), 0600) == 0);
}

} // namespace

TEST_CASE("a run that ends well is code 0 and says nothing",
          "[runtime][launch]") {
  scratch_dir dir;
  ::unsetenv("SMP_RANK");
  auto x = launch_in(dir, shell("echo $SMP_RANK $SMP_WORLD_SIZE "
                                "$SMP_LOCAL_RANK $SMP_LOCAL_SIZE "
                                "$OMP_WAIT_POLICY $UCX_MEM_MMAP_HOOK_MODE "
                                "$GLIBC_TUNABLES "
                                "${#SMP_RUN_ID} ${SMP_RENDEZVOUS%:*} "
                                "${SMP_RUN_DIR#$DIR/}"));
  CHECK(x.code == 0);
  CHECK(x.told.empty());
  CHECK(dir.read("logs/log-0.txt")
        == "0 2 0 2 passive none glibc.malloc.hugetlb=1 32 127.0.0.1 logs\n");
  CHECK(dir.read("logs/log-1.txt")
        == "1 2 1 2 passive none glibc.malloc.hugetlb=1 32 127.0.0.1 logs\n");
}

TEST_CASE("each rank is handed the secret of the run, not by its environment",
          "[runtime][launch]") {
  scratch_dir dir;
  auto secret = "/proc/self/fd/$SMP_SECRET_FD";
  auto hex = std::string{"od -An -v -tx1 "} + secret + " | tr -d ' \n'";
  auto x = launch_in(dir, shell(hex + "; echo; env | grep -c $(" + hex + ")"));
  auto told = dir.read("logs/log-0.txt");
  INFO(told);
  CHECK(told.size() == 64 + std::string{"\n0\n"}.size());
  CHECK(told.substr(64) == "\n0\n");
  CHECK(dir.read("logs/log-1.txt") == told);
  // Another run has another one.
  scratch_dir other;
  launch_in(other, shell(hex));
  CHECK(other.read("logs/log-0.txt") != told.substr(0, 64));
}

TEST_CASE("the exit code tells what kind of end it was", "[runtime][launch]") {
  auto [rank_code, code] = GENERATE(table<int, int>(
    {{1, 3}, {2, 2}, {3, 3}, {4, 4}, {5, 5}, {7, 3}, {134, 3}}));
  scratch_dir dir;
  auto x = launch_in(dir, shell("if [ $SMP_RANK = 1 ]; then exit "
                                + std::to_string(rank_code)
                                + "; fi; exec tail -f /dev/null"));
  CHECK(x.code == code);
  CHECK_THAT(x.told, ContainsSubstring("smp: rank 1: exited with code "
                                       + std::to_string(rank_code)));
}

TEST_CASE("what a killed rank had half written goes", "[runtime][launch]") {
  scratch_dir dir;
  auto x = launch_in(dir, shell("if [ $SMP_RANK = 1 ]; then "
                                "echo > $DIR/logs/model.partial-$$-0; "
                                "echo > $DIR/logs/model.partial-1-0; "
                                "kill -9 $$; fi; exec tail -f /dev/null"));
  CHECK(x.code == 3);
  size_t left = 0;
  for (auto& file : std::filesystem::directory_iterator{dir.path / "logs"})
    left += file.path().string().find(".partial-") != std::string::npos;
  // Who wrote the other one may still be at it.
  CHECK(left == 1);
}

TEST_CASE("shared memory that a killed rank had just made goes",
          "[runtime][launch]") {
  scratch_dir dir;
  auto shared = dir.path / "shm";
  std::filesystem::create_directory(shared);
  ::setenv("UCX_POSIX_DIR", shared.c_str(), 1);
  file_descriptor used{::open((shared / "ucx_shm_posix_2").c_str(),
                              O_WRONLY | O_CREAT | O_CLOEXEC, 0600)};
  // In use without a descriptor; the name of the dead one begins like it.
  auto mapped = shared / "ucx_shm_posix_10";
  std::ofstream{mapped} << "bytes";
  void* bytes = nullptr;
  {
    file_descriptor file{::open(mapped.c_str(), O_RDONLY | O_CLOEXEC)};
    bytes = ::mmap(nullptr, 5, PROT_READ, MAP_SHARED, file.get(), 0);
    REQUIRE(bytes != MAP_FAILED);
  }
  auto x = launch_in(dir, shell("if [ $SMP_RANK = 1 ]; then "
                                "echo > $DIR/shm/ucx_shm_posix_1; "
                                "echo > $DIR/shm/other; "
                                "kill -9 $$; fi; exec tail -f /dev/null"));
  ::unsetenv("UCX_POSIX_DIR");
  CHECK(x.code == 3);
  CHECK_FALSE(std::filesystem::exists(shared / "ucx_shm_posix_1"));
  CHECK(std::filesystem::exists(shared / "ucx_shm_posix_2"));
  CHECK(std::filesystem::exists(mapped));
  ::munmap(bytes, 5);
  CHECK(std::filesystem::exists(shared / "other"));
}

TEST_CASE("a killed rank is one line that names it, its signal and its log",
          "[runtime][launch]") {
  auto took = best_of<clock_type::duration>(3, 3s, [] {
    scratch_dir dir;
    auto begin = clock_type::now();
    auto x = launch_in(dir, shell("if [ $SMP_RANK = 1 ]; then kill -9 $$; fi; "
                                  "exec tail -f /dev/null"));
    auto end = clock_type::now();
    CHECK(x.code == 3);
    CHECK(x.told
          == "smp: rank 1: killed by signal 9 (SIGKILL); its output: "
               + (dir.path / "logs/log-1.txt").string() + "\n");
    return end - begin;
  });
  CHECK(took < 3s);
}

TEST_CASE("a configuration error of all ranks appears once",
          "[runtime][launch]") {
  scratch_dir dir;
  auto options = shell("echo run.toml:3: unknown key >&2; exit 2");
  options.grace = 20s; // both end by themselves, one perhaps long after
  auto x = launch_in(dir, options);
  CHECK(x.code == 2);
  CHECK(x.told == "run.toml:3: unknown key\n");
}

TEST_CASE("an error that only another rank knows is told with its last words",
          "[runtime][launch]") {
  scratch_dir dir;
  auto x = launch_in(dir, shell("if [ $SMP_RANK = 1 ]; then echo begin; echo "
                                "another build >&2; exit 2; fi; exec tail -f "
                                "/dev/null"));
  CHECK(x.code == 2);
  CHECK_THAT(x.told, ContainsSubstring(
                       "smp: rank 1: exited with code 2: another build; its"));
}

TEST_CASE("ranks that begin no session in time are named",
          "[runtime][launch]") {
  scratch_dir dir;
  auto x = shell("exec tail -f /dev/null");
  x.join_limit = 300ms;
  auto result = launch_in(dir, std::move(x));
  CHECK(result.code == 3);
  CHECK_THAT(result.told,
             ContainsSubstring("ranks 0, 1 did not join within 0.3 s"));
}

TEST_CASE("a rank that is alone joins nobody, however long it runs",
          "[runtime][launch]") {
  scratch_dir dir;
  auto x = ranks_of(
    1, {"sh", "-c", "i=0; while [ $i -lt 30000 ]; do i=$((i + 1)); done"});
  x.join_limit = 1ms;
  auto result = launch_in(dir, std::move(x));
  CHECK(result.code == 0);
  CHECK(result.told.empty());
}

TEST_CASE("an interrupted run is code 130", "[runtime][launch]") {
  scratch_dir dir;
  make_pipe(dir, "ready");
  auto user = std::async(std::launch::async, [&] {
    dir.read("ready"); // until both ranks have closed it
    ::kill(::getpid(), SIGINT);
  });
  // Both hold the pipe open until they are ready: rank 1 waits for rank 0.
  make_pipe(dir, "both");
  auto x = launch_in(dir, shell("trap 'exit 130' INT; tail -f /dev/null & "
                                "if [ $SMP_RANK = 0 ]; then "
                                "  echo >$DIR/both; "
                                "else "
                                "  read x <$DIR/both; echo >$DIR/ready; "
                                "fi; wait"));
  user.get();
  CHECK(x.code == 130);
  CHECK_THAT(x.told, ContainsSubstring("interrupted"));
  CHECK_THAT(x.told, !ContainsSubstring("rank"));
}

TEST_CASE("what cannot be launched is an error before anything starts",
          "[runtime][launch]") {
  CHECK_THROWS_AS(launch(ranks_of(0, {"true"})), error);
  CHECK_THROWS_AS(launch(ranks_of(2, {"no-such-program-of-smp"})), error);
}

// -- ranks that join ----------------------------------------------------------

TEST_CASE("child: joins, then rank 1 dies and rank 0 tells what it hears",
          "[.][joiner]") {
  prepare_process(0, nullptr);
  auto env = read_rank_environment();
  REQUIRE(env);
  REQUIRE(env->supervised);
  actor_host host;
  std::promise<failure> lost;
  std::atomic<bool> first = true;
  membership::options x;
  x.address = env->rendezvous_address;
  x.port = env->rendezvous_port;
  x.secret = *given_secret(*env);
  x.world_size = env->world_size;
  x.me.rank = rank_id{env->rank};
  x.me.pid = ::getpid();
  x.me.host = "here";
  x.me.run_id = env->run_id;
  x.on_rank_down = [&](const failure& f) {
    if (first.exchange(false))
      lost.set_value(f);
  };
  membership member{host, x};
  auto all = member.join();
  REQUIRE(all.size() == 2);
  if (env->rank == 1)
    ::kill(::getpid(), SIGKILL);
  auto heard = lost.get_future();
  REQUIRE(heard.wait_for(10s) == std::future_status::ready);
  std::ofstream{directory() + "/heard"} << heard.get().describe();
  std::fflush(nullptr);
  ::_exit(3);
}

TEST_CASE("the others hear from the launcher how a rank died",
          "[runtime][launch]") {
  const std::string cause = "rank 1: killed by signal 9 (SIGKILL)";
  std::string heard;
  // A launcher that looks at its children later than a second after the
  // connection broke has the others hear of that.
  for (int attempt = 0; attempt < 3 && heard != cause; ++attempt) {
    scratch_dir dir;
    auto options = ranks_of(2, this_program("[joiner]"));
    options.grace = 40s; // rank 0 ends by itself
    auto x = launch_in(dir, std::move(options));
    CHECK(x.code == 3);
    CHECK(std::count(x.told.begin(), x.told.end(), '\n') == 1);
    CHECK_THAT(x.told, ContainsSubstring("rank 1: killed by signal 9"));
    heard = dir.read("heard");
    if (heard != cause)
      CHECK(heard == "rank 1: lost: its process ended or its connection broke");
  }
  CHECK(heard == cause);
}

TEST_CASE("a run begins without the end and the stall of another one",
          "[runtime][launch]") {
  scratch_dir dir;
  dir.write("logs/stall.json", "old");
  dir.write("logs/end.json", "old");
  auto x = launch_in(dir, shell("test $SMP_RANK = 0 || exit 2"));
  CHECK(x.code == 2);
  CHECK_FALSE(std::filesystem::exists(dir.path / "logs/stall.json"));
  CHECK_THAT(dir.read("logs/end.json"), ContainsSubstring("\"exit_code\": 2"));
}

TEST_CASE("one can look at a run from its begin", "[runtime][launch]") {
  scratch_dir dir;
  const auto entry = dir.path / "logs/inspect.entry";
  // The ranks look, as somebody may who finds their logs.
  const std::string look = "test $(stat -c %a $DIR/logs/inspect.entry) = 600";
  CHECK(launch_in(dir, shell(look + " || exit 2")).code == 0);
  CHECK_FALSE(std::filesystem::exists(entry));
  // Of a single one nobody else knows where to ask.
  auto alone = launch_in(
    dir, ranks_of(1, {"sh", "-c",
                      look
                        + " && grep -q '^port 0$' $DIR/logs/inspect.entry "
                          "|| exit 2"}));
  CHECK(alone.code == 0);
  CHECK_FALSE(std::filesystem::exists(entry));
}

TEST_CASE("a rank that is stopped before it joins is a stall of its time",
          "[runtime][launch][R7]") {
  scratch_dir dir;
  // Rank 0 waits for the other as ranks that join do.
  auto x = shell("test $SMP_RANK = 0 && read x < $DIR/never; kill -STOP $$");
  make_pipe(dir, "never");
  x.stalls = {.timeout = 0.5, .end = true};
  auto begin = clock_type::now();
  auto end = launch_in(dir, std::move(x));
  CHECK(end.code == 4);
  CHECK(stopped_since(end.told, "before all ranks joined\n") >= 0.5);
  CHECK(clock_type::now() - begin < 20s); // the time for joining is 30 s
  CHECK_THAT(dir.read("logs/stall.json"), ContainsSubstring("rank 1"));
}

TEST_CASE("child: joins, leaves, and rank 1 is stopped on its way out",
          "[.][leaver]") {
  prepare_process(0, nullptr);
  auto env = read_rank_environment();
  REQUIRE(env);
  actor_host host;
  membership::options x;
  x.address = env->rendezvous_address;
  x.port = env->rendezvous_port;
  x.secret = *given_secret(*env);
  x.world_size = env->world_size;
  x.me.rank = rank_id{env->rank};
  x.me.pid = ::getpid();
  x.me.run_id = env->run_id;
  membership member{host, x};
  REQUIRE(member.join().size() == 2);
  member.leave();
  if (env->rank == 1)
    ::raise(SIGSTOP);
}

TEST_CASE("a rank that is stopped on its way out keeps nobody for ever",
          "[runtime][launch][R7]") {
  scratch_dir dir;
  auto x = ranks_of(2, this_program("[leaver]"));
  x.stalls = {.timeout = 0.5, .end = true};
  auto end = launch_in(dir, std::move(x));
  CHECK(end.code == 4);
  auto since = stopped_since(end.told, "and others have left the run");
  CHECK(since >= 0.5);
  CHECK(since < 20);
}

TEST_CASE("child: a rank that is refused, and takes its time to end",
          "[.][refused]") {
  auto env = read_rank_environment();
  REQUIRE(env);
  actor_host host;
  membership::options x;
  x.port = env->rendezvous_port;
  x.secret = *given_secret(*env);
  x.world_size = env->world_size;
  x.me.rank = rank_id{env->rank};
  x.me.run_id = env->run_id;
  x.me.settings = "smp.seed = " + std::to_string(env->rank) + "\n";
  membership member{host, x};
  CHECK_THROWS_AS(member.join(), error);
  for (;;) // as on a machine with much to do
    ::pause();
}

TEST_CASE("a wrong configuration is that, however long the ranks take to end",
          "[runtime][launch]") {
  scratch_dir dir;
  auto x = launch_in(dir, ranks_of(2, this_program("[refused]")));
  CHECK(x.code == 2);
  CHECK_THAT(x.told, ContainsSubstring("has another configuration than rank"));
  CHECK(std::count(x.told.begin(), x.told.end(), '\n') == 1);
}

TEST_CASE("child: launches itself, as smp-train does", "[.][launcher]") {
  if (auto env = read_rank_environment()) {
    std::ofstream made{directory() + "/rank-" + std::to_string(env->rank)};
    return;
  }
  launch_options x;
  x.ranks = 3;
  CHECK(launch(x) == 0);
}

TEST_CASE("without a command the ranks run this program with its arguments",
          "[runtime][launch]") {
  scratch_dir dir;
  auto pid = ::fork();
  if (pid == 0) {
    ::setenv("DIR", dir.path.c_str(), 1);
    auto program = this_program("[launcher]");
    ::execl(program[0].c_str(), program[0].c_str(), program[1].c_str(),
            nullptr);
    ::_exit(127);
  }
  int status = 0;
  REQUIRE(::waitpid(pid, &status, 0) == pid);
  CHECK(status == 0);
  for (auto name : {"rank-0", "rank-1", "rank-2"})
    CHECK(std::filesystem::exists(dir.path / name));
}
