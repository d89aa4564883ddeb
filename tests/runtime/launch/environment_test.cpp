#include "tests/support/catch.hpp"

#include "runtime/launch/environment.hpp"
#include "runtime/launch/rendezvous.hpp"
#include "runtime/launch/secret_handover.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/scratch_dir.hpp"
#include "transport/error.hpp"

#include <chrono>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <latch>
#include <map>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <malloc.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

using namespace smp;
using namespace smp::test;
using namespace std::chrono_literals;

using Catch::Matchers::ContainsSubstring;

namespace {

/// Runs with exactly these launcher variables, then puts all back.
class with_variables {
public:
  explicit with_variables(const std::map<std::string, std::string>& wanted) {
    for (auto name : {"SMP_RANK",
                      "SMP_WORLD_SIZE",
                      "SMP_LOCAL_RANK",
                      "SMP_LOCAL_SIZE",
                      "SMP_RUN_ID",
                      "SMP_RENDEZVOUS",
                      "SMP_RENDEZVOUS_DIR",
                      "SMP_SECRET_FD",
                      "SMP_PROGRESS_FD",
                      "SMP_SECRET_FILE",
                      "SMP_TERMINAL",
                      "SMP_NO_SHARED_MEMORY",
                      "SMP_RUN_DIR",
                      "RANK",
                      "WORLD_SIZE",
                      "LOCAL_RANK",
                      "LOCAL_WORLD_SIZE",
                      "MASTER_ADDR",
                      "MASTER_PORT",
                      "TORCHELASTIC_RUN_ID",
                      "TORCHELASTIC_USE_AGENT_STORE",
                      "OMPI_COMM_WORLD_RANK",
                      "OMPI_COMM_WORLD_SIZE",
                      "OMPI_COMM_WORLD_LOCAL_RANK",
                      "OMPI_COMM_WORLD_LOCAL_SIZE",
                      "PMIX_NAMESPACE",
                      "OMPI_MCA_ess_base_jobid",
                      "PMI_RANK",
                      "PMI_SIZE",
                      "MPI_LOCALRANKID",
                      "MPI_LOCALNRANKS",
                      "SLURM_PROCID",
                      "SLURM_NTASKS",
                      "SLURM_STEP_NUM_TASKS",
                      "SLURM_LOCALID",
                      "SLURM_JOB_ID",
                      "SLURM_STEP_ID",
                      "SLURM_STEP_TASKS_PER_NODE",
                      "SLURM_NODEID",
                      "TMPDIR"})
      set(name, nullptr);
    for (auto& [name, value] : wanted)
      set(name, value.c_str());
  }

  ~with_variables() {
    for (auto& [name, value] : before_)
      if (value)
        ::setenv(name.c_str(), value->c_str(), 1);
      else
        ::unsetenv(name.c_str());
  }

private:
  void set(const std::string& name, const char* value) {
    auto old = std::getenv(name.c_str());
    before_.emplace(name, old ? std::optional<std::string>{old} : std::nullopt);
    if (value != nullptr)
      ::setenv(name.c_str(), value, 1);
    else
      ::unsetenv(name.c_str());
  }

  std::map<std::string, std::optional<std::string>> before_;
};

rank_environment
read_with(const std::map<std::string, std::string>& variables) {
  with_variables scope{variables};
  auto result = read_rank_environment();
  REQUIRE(result);
  return *result;
}

std::string error_with(const std::map<std::string, std::string>& variables) {
  with_variables scope{variables};
  return test::error_of([] { read_rank_environment(); }, error_code::config);
}

rank_environment rendezvous_at(const scratch_dir& dir) {
  rank_environment result;
  result.run_id = "mpi-1/../2";
  result.rendezvous_dir = dir.path;
  return result;
}

} // namespace

// -- launchers ----------------------------------------------------------------

TEST_CASE("without a launcher's variables there is no rank",
          "[runtime][environment]") {
  with_variables scope{{}};
  CHECK_FALSE(read_rank_environment());
}

TEST_CASE("the variables of our launcher name rank, run and supervisor",
          "[runtime][environment]") {
  auto x = read_with({{"SMP_RANK", "1"},
                      {"SMP_WORLD_SIZE", "4"},
                      {"SMP_LOCAL_RANK", "1"},
                      {"SMP_LOCAL_SIZE", "4"},
                      {"SMP_RUN_ID", "secret"},
                      {"SMP_RENDEZVOUS", "127.0.0.1:4567"},
                      {"SMP_NO_SHARED_MEMORY", "it is full"},
                      {"SMP_RUN_DIR", "runs/x"}});
  CHECK(x.rank == 1);
  CHECK(x.world_size == 4);
  CHECK(x.local_rank == 1);
  CHECK(x.local_size == 4);
  CHECK(x.run_id == "secret");
  CHECK(x.rendezvous_address == "127.0.0.1");
  CHECK(x.rendezvous_port == 4567);
  CHECK(x.supervised);
  CHECK(x.no_shared_memory == "it is full");
  CHECK(x.run_dir == "runs/x");
}

TEST_CASE("a torchrun-like launcher names the address where rank 0 listens",
          "[runtime][environment]") {
  std::map<std::string, std::string> variables = {{"RANK", "3"},
                                                  {"WORLD_SIZE", "4"},
                                                  {"LOCAL_RANK", "1"},
                                                  {"LOCAL_WORLD_SIZE", "2"},
                                                  {"MASTER_ADDR", "node7"},
                                                  {"MASTER_PORT", "29500"}};
  auto x = read_with(variables);
  CHECK(x.rank == 3);
  CHECK(x.world_size == 4);
  CHECK(x.local_rank == 1);
  CHECK(x.local_size == 2);
  CHECK(x.rendezvous_address == "node7");
  CHECK(x.rendezvous_port == 29500);
  CHECK_FALSE(x.supervised);
  CHECK_FALSE(x.run_id.empty());
  // torchrun's own store listens at that port: the file is used instead.
  scratch_dir dir;
  variables["TORCHELASTIC_USE_AGENT_STORE"] = "True";
  variables["TORCHELASTIC_RUN_ID"] = "abc";
  variables["MASTER_ADDR"] = "localhost";
  variables["SMP_RENDEZVOUS_DIR"] = dir.path;
  auto y = read_with(variables);
  CHECK(y.rendezvous_port == 0);
  CHECK(y.rendezvous_address == "127.0.0.1");
  CHECK(y.rendezvous_dir == dir.path);
  CHECK_THAT(y.run_id, ContainsSubstring("abc"));
}

TEST_CASE("Open MPI and Slurm name rank, size and job",
          "[runtime][environment]") {
  scratch_dir dir;
  auto x = read_with({{"OMPI_COMM_WORLD_RANK", "1"},
                      {"OMPI_COMM_WORLD_SIZE", "2"},
                      {"OMPI_COMM_WORLD_LOCAL_RANK", "0"},
                      {"OMPI_COMM_WORLD_LOCAL_SIZE", "1"},
                      {"PMIX_NAMESPACE", "77"},
                      {"SMP_RENDEZVOUS_DIR", dir.path}});
  CHECK(x.rank == 1);
  CHECK(x.world_size == 2);
  CHECK(x.local_rank == 0);
  CHECK(x.local_size == 1);
  CHECK_THAT(x.run_id, ContainsSubstring("77"));
  CHECK(x.rendezvous_port == 0);
  CHECK_FALSE(x.supervised);
  std::map<std::string, std::string> slurm = {
    {"SLURM_PROCID", "5"},  {"SLURM_NTASKS", "8"},
    {"SLURM_LOCALID", "1"}, {"SLURM_JOB_ID", "42"},
    {"SLURM_STEP_ID", "3"}, {"SMP_RENDEZVOUS_DIR", dir.path}};
  auto y = read_with(slurm);
  CHECK(y.rank == 5);
  CHECK(y.world_size == 8);
  CHECK(y.local_rank == 1);
  CHECK_THAT(y.run_id, ContainsSubstring("42"));
  CHECK_THAT(y.run_id, ContainsSubstring("3"));
  CHECK(x.told_by == "OMPI_COMM_WORLD_RANK and OMPI_COMM_WORLD_SIZE");
  CHECK(y.told_by == "SLURM_STEP_ID");
  // Where rank 0 is, on several machines, the user says.
  slurm["MASTER_ADDR"] = "fd00::7";
  slurm["MASTER_PORT"] = "29400";
  auto z = read_with(slurm);
  CHECK(z.rendezvous_address == "fd00::7");
  CHECK(z.rendezvous_port == 29400);
  // A program that the batch script starts without srun is not a rank.
  slurm["SLURM_STEP_ID"] = "4294967291";
  with_variables scope{slurm};
  CHECK_FALSE(read_rank_environment());
}

TEST_CASE("a task of srun is a rank, and the batch script around it is none",
          "[runtime][environment]") {
  scratch_dir dir;
  // As Slurm 22.05 sets them in a job of two nodes with two tasks each.
  std::map<std::string, std::string> job = {{"SLURM_JOB_ID", "20"},
                                            {"SLURM_NTASKS", "4"},
                                            {"SLURM_TASKS_PER_NODE", "2(x2)"},
                                            {"SLURM_PROCID", "0"},
                                            {"SLURM_LOCALID", "0"},
                                            {"SLURM_NODEID", "0"},
                                            {"SMP_RENDEZVOUS_DIR", dir.path}};
  auto task = job;
  task["SLURM_STEP_ID"] = "0";
  task["SLURM_STEP_NUM_TASKS"] = "4";
  task["SLURM_STEP_TASKS_PER_NODE"] = "2(x2)";
  task["SLURM_PROCID"] = "3";
  task["SLURM_LOCALID"] = "1";
  task["SLURM_NODEID"] = "1";
  auto x = read_with(task);
  CHECK(x.rank == 3);
  CHECK(x.world_size == 4);
  CHECK(x.local_rank == 1);
  CHECK(x.local_size == 2);
  CHECK(x.run_id == "slurm-20.0");
  // The script has a number, but no step.
  with_variables scope{job};
  CHECK_FALSE(read_rank_environment());
}

TEST_CASE("Slurm tells how many ranks a node has", "[runtime][environment]") {
  scratch_dir dir;
  auto local_size = [&](const char* tasks, const char* node) {
    return read_with({{"SLURM_PROCID", "5"},
                      {"SLURM_NTASKS", "8"},
                      {"SLURM_LOCALID", "1"},
                      {"SLURM_JOB_ID", "42"},
                      {"SLURM_STEP_ID", "3"},
                      {"SLURM_STEP_TASKS_PER_NODE", tasks},
                      {"SLURM_NODEID", node},
                      {"SMP_RENDEZVOUS_DIR", dir.path}})
      .local_size;
  };
  CHECK(local_size("2(x4)", "0") == 2);
  CHECK(local_size("2(x4)", "3") == 2);
  CHECK(local_size("3,2,3", "1") == 2);
  CHECK(local_size("2(x2),4", "2") == 4);
  CHECK(local_size("8", "0") == 8);
  // What makes no sense counts as not said.
  CHECK(local_size("2(x4)", "4") == 0);
  CHECK(local_size("1(x8)", "5") == 0); // this one is the second there
  CHECK(local_size("9", "0") == 0);
  CHECK(local_size("two", "0") == 0);
  CHECK(local_size("", "0") == 0);
}

TEST_CASE("our own variables count more than those around them",
          "[runtime][environment]") {
  auto x = read_with({{"SMP_RANK", "1"},
                      {"SMP_WORLD_SIZE", "2"},
                      {"SMP_RUN_ID", "r"},
                      {"SMP_RENDEZVOUS", "127.0.0.1:1"},
                      {"RANK", "0"},
                      {"WORLD_SIZE", "7"},
                      {"MASTER_PORT", "5"}});
  CHECK(x.rank == 1);
  CHECK(x.world_size == 2);
}

TEST_CASE("variables that contradict each other are named in the error",
          "[runtime][environment]") {
  CHECK_THAT(error_with({{"SMP_RANK", "0"}}),
             ContainsSubstring("SMP_RANK is set but SMP_WORLD_SIZE is not; a "
                               "launcher sets both; without one, unset it"));
  CHECK_THAT(error_with({{"WORLD_SIZE", "2"}}),
             ContainsSubstring("WORLD_SIZE is set but RANK is not"));
  CHECK_THAT(error_with({{"RANK", "2"}, {"WORLD_SIZE", "2"}}),
             ContainsSubstring("RANK=2 must be less than WORLD_SIZE=2"));
  CHECK_THAT(error_with({{"RANK", "one"}, {"WORLD_SIZE", "2"}}),
             ContainsSubstring("RANK=one is not a number"));
  CHECK_THAT(error_with({{"RANK", "-1"}, {"WORLD_SIZE", "2"}}),
             ContainsSubstring("RANK=-1"));
  CHECK_THAT(error_with({{"RANK", "0"}, {"WORLD_SIZE", "2"}}),
             ContainsSubstring("set MASTER_PORT or, without a launcher, unset "
                               "RANK and WORLD_SIZE"));
  CHECK_THAT(
    error_with({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_PORT", "70000"}}),
    ContainsSubstring("MASTER_PORT=70000"));
  CHECK_THAT(error_with({{"RANK", "0"},
                         {"WORLD_SIZE", "2"},
                         {"LOCAL_RANK", "2"},
                         {"MASTER_PORT", "1"}}),
             ContainsSubstring("LOCAL_RANK=2"));
  CHECK_THAT(error_with({{"SMP_RANK", "0"}, {"SMP_WORLD_SIZE", "1"}}),
             ContainsSubstring("SMP_RUN_ID"));
  CHECK_THAT(error_with({{"SMP_RANK", "0"},
                         {"SMP_WORLD_SIZE", "1"},
                         {"SMP_RUN_ID", "r"},
                         {"SMP_RENDEZVOUS", "nowhere"}}),
             ContainsSubstring("SMP_RENDEZVOUS=nowhere"));
}

TEST_CASE("MPICH names rank and size, and the process that started all",
          "[runtime][environment]") {
  scratch_dir dir;
  std::map<std::string, std::string> variables = {{"PMI_RANK", "3"},
                                                  {"PMI_SIZE", "4"},
                                                  {"MPI_LOCALRANKID", "3"},
                                                  {"MPI_LOCALNRANKS", "4"},
                                                  {"TMPDIR", dir.path}};
  auto x = read_with(variables);
  CHECK(x.rank == 3);
  CHECK(x.world_size == 4);
  CHECK(x.local_rank == 3);
  CHECK(x.local_size == 4);
  CHECK(x.run_id == "mpich-" + std::to_string(::getppid()));
  // On several machines each has another parent.
  variables["MPI_LOCALNRANKS"] = "2";
  variables["MPI_LOCALRANKID"] = "1";
  CHECK_THAT(error_with(variables),
             ContainsSubstring("set MASTER_ADDR and MASTER_PORT"));
  variables["MASTER_ADDR"] = "a";
  variables["MASTER_PORT"] = "29400";
  CHECK(read_with(variables).run_id == "mpich-a-29400");
  // srun --mpi=pmi2 sets them as well.
  variables.insert({{"SLURM_PROCID", "3"},
                    {"SLURM_NTASKS", "4"},
                    {"SLURM_LOCALID", "1"},
                    {"SLURM_JOB_ID", "42"},
                    {"SLURM_STEP_ID", "3"}});
  CHECK(read_with(variables).told_by == "SLURM_STEP_ID");
}

TEST_CASE("the rendezvous directory is private to the user",
          "[runtime][environment]") {
  scratch_dir dir;
  std::map<std::string, std::string> variables = {{"OMPI_COMM_WORLD_RANK", "0"},
                                                  {"OMPI_COMM_WORLD_SIZE", "1"},
                                                  {"PMIX_NAMESPACE", "1"},
                                                  {"TMPDIR", dir.path}};
  auto x = read_with(variables);
  struct stat info {};
  REQUIRE(::stat(x.rendezvous_dir.c_str(), &info) == 0);
  CHECK((info.st_mode & 0777) == 0700);
  CHECK(read_with(variables).rendezvous_dir == x.rendezvous_dir);
  // Somebody opened it: who else writes there decides where ranks connect.
  REQUIRE(::chmod(x.rendezvous_dir.c_str(), 0777) == 0);
  CHECK_THAT(error_with(variables), ContainsSubstring(x.rendezvous_dir));
  // As on a machine of a cluster that lacks what the others have.
  variables["TMPDIR"] = dir.path / "nowhere";
  auto why = error_with(variables);
  CHECK_THAT(why, ContainsSubstring("TMPDIR"));
  CHECK_THAT(why, ContainsSubstring("SMP_RENDEZVOUS_DIR"));
}

TEST_CASE("a rank asks its launcher whether a terminal shows its output",
          "[runtime][environment]") {
  {
    with_variables scope{{{"SMP_TERMINAL", "1"}}};
    CHECK(stderr_is_terminal());
  }
  {
    with_variables scope{{{"SMP_TERMINAL", "0"}}};
    CHECK_FALSE(stderr_is_terminal());
  }
}

// -- the meeting point
// ---------------------------------------------------------

TEST_CASE("a rank that waits learns port and secret from rank 0's file",
          "[runtime][rendezvous]") {
  scratch_dir dir;
  auto x = rendezvous_at(dir);
  meeting_point seen;
  std::thread other{[&] { seen = await_point(x, 10s); }};
  {
    auto secret = run_secret::make();
    published_point published{x, {4321, secret}};
    other.join();
    CHECK(seen.port == 4321);
    REQUIRE(seen.secret);
    CHECK(seen.secret->to_hex() == secret.to_hex());
    CHECK_FALSE(std::filesystem::is_empty(dir.path));
  }
  CHECK(std::filesystem::is_empty(dir.path));
}

TEST_CASE("nobody else can read what rank 0 publishes",
          "[runtime][rendezvous]") {
  scratch_dir dir;
  auto x = rendezvous_at(dir);
  auto before = ::umask(0);
  published_point published{x, {4321, run_secret::make()}};
  ::umask(before);
  for (auto& file : std::filesystem::directory_iterator{dir.path}) {
    struct stat info {};
    REQUIRE(::stat(file.path().c_str(), &info) == 0);
    CHECK((info.st_mode & 0777) == 0600);
    // Whoever opens it to others gives the run away.
    REQUIRE(::chmod(file.path().c_str(), 0640) == 0);
  }
  CHECK_THAT(test::error_of([&] { await_point(x, 10s); }, error_code::config),
             ContainsSubstring("mode 0600"));
}

TEST_CASE("a user's own secret is not published", "[runtime][rendezvous]") {
  scratch_dir dir;
  auto x = rendezvous_at(dir);
  published_point published{x, {4321, std::nullopt}};
  auto seen = await_point(x, 10s);
  CHECK(seen.port == 4321);
  CHECK_FALSE(seen.secret);
}

TEST_CASE("waiting for a meeting point ends at its deadline and names rank 0",
          "[runtime][rendezvous]") {
  scratch_dir dir;
  auto x = rendezvous_at(dir);
  try {
    await_point(x, 30ms);
    FAIL("no error");
  } catch (const error& e) {
    CHECK(e.cause().rank == rank_id{0});
    CHECK_THAT(e.what(), ContainsSubstring("30 ms"));
    CHECK_THAT(e.what(), ContainsSubstring(dir.path));
    CHECK_THAT(e.what(), ContainsSubstring("SMP_SECRET_FILE"));
  }
}

TEST_CASE("the file of a rank 0 that died is not taken for a live one",
          "[runtime][rendezvous]") {
  scratch_dir dir;
  auto x = rendezvous_at(dir);
  // A process that publishes and dies without cleaning up.
  auto pid = ::fork();
  if (pid == 0) {
    new published_point{x, {1111, run_secret::make()}};
    ::_exit(0);
  }
  REQUIRE(::waitpid(pid, nullptr, 0) == pid);
  REQUIRE_FALSE(std::filesystem::is_empty(dir.path));
  CHECK_THROWS_AS(await_point(x, 30ms), error);
  published_point published{x, {2222, run_secret::make()}};
  CHECK(await_point(x, 30ms).port == 2222);
}

TEST_CASE("a directory that cannot be written is named",
          "[runtime][rendezvous]") {
  rank_environment x;
  x.run_id = "r";
  x.rendezvous_dir = "/nonexistent";
  try {
    published_point published{x, {1, std::nullopt}};
    FAIL("no error");
  } catch (const error& e) {
    CHECK_THAT(e.what(), ContainsSubstring("/nonexistent"));
    CHECK_THAT(e.what(), ContainsSubstring("SMP_RENDEZVOUS_DIR"));
  }
}

// -- R27 ----------------------------------------------------------------------

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#  define SMP_TEST_OTHER_MALLOC 1
#else
#  define SMP_TEST_OTHER_MALLOC 0
#endif

TEST_CASE("child: writes the environment that a prepared process sees",
          "[.][prepared]") {
  prepare_process(0, nullptr); // nothing is missing any more
  auto value = [](const char* name) {
    auto x = std::getenv(name);
    return std::string{x != nullptr ? x : "-"};
  };
  std::ifstream own{"/proc/self/comm"};
  std::string name;
  std::getline(own, name);
  std::ofstream{std::getenv("SMP_TEST_OUT")}
    << name << " " << ::getpid() << " " << value("OMP_WAIT_POLICY") << " "
    << value("UCX_MEM_MMAP_HOOK_MODE") << " " << value("GLIBC_TUNABLES") << " "
    << value("SMP_PREPARED");
  if (SMP_TEST_OTHER_MALLOC)
    return;
  // A tensor of 64 MB comes from the heap and stays there.
  constexpr size_t size = 64 << 20;
  auto mapped = ::mallinfo2().hblks;
  void* volatile block = std::malloc(size);
  CHECK(::mallinfo2().hblks == mapped);
  std::free(block);
  CHECK(::mallinfo2().keepcost >= size);
  // What one thread freed serves all others, while it lives.
  constexpr size_t threads = 4, part = 16 << 20;
  auto heap = ::mallinfo2().arena;
  std::latch done{threads};
  std::vector<std::thread> all;
  for (size_t i = 0; i < threads; ++i) {
    std::latch used{1};
    all.emplace_back([&] {
      void* volatile x = std::malloc(part);
      std::free(x);
      used.count_down();
      done.arrive_and_wait();
    });
    used.wait();
  }
  for (auto& x : all)
    x.join();
  CHECK(::mallinfo2().arena < heap + 2 * part);
}

TEST_CASE(
  "a process without the variables that precede exec executes itself "
  "once, in place",
  "[runtime][environment]") {
  scratch_dir dir;
  auto out = (dir.path / "out").string();
  auto given = GENERATE(as<std::string>{}, "", "active");
  auto pid = ::fork();
  if (pid == 0) {
    ::setenv("SMP_TEST_OUT", out.c_str(), 1);
    ::unsetenv("UCX_MEM_MMAP_HOOK_MODE");
    ::unsetenv("OMP_WAIT_POLICY");
    ::unsetenv("GLIBC_TUNABLES");
    if (!given.empty()) // a user's own choice stays
      ::setenv("OMP_WAIT_POLICY", given.c_str(), 1);
    char program[] = "test";
    char which[] = "[prepared]";
    char* argv[] = {program, which, nullptr};
    prepare_process(2, argv);
    ::_exit(1); // must have become another program
  }
  int status = 0;
  REQUIRE(::waitpid(pid, &status, 0) == pid);
  CHECK(status == 0);
  CHECK(dir.read("out")
        == "test " + std::to_string(pid) + " "
             + (given.empty() ? "passive" : given)
             + " none glibc.malloc.hugetlb=1 -");
}
