// ctest: label=multiprocess alone
#include "tests/support/catch.hpp"

#include "actors/cluster/membership.hpp"
#include "actors/protocol/actor_system.hpp"
#include "actors/protocol/actors.hpp"
#include "tests/support/actors/payloads.hpp"
#include "tests/support/best_of.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/runs/tcp.hpp"

#include <caf/io/middleman.hpp>
#include <caf/send.hpp>

#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstdlib>
#include <future>
#include <memory>
#include <mutex>
#include <optional>
#include <spawn.h>
#include <string>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>

using namespace smp;
using namespace std::chrono_literals;
using Catch::Matchers::ContainsSubstring;

extern char** environ;

namespace {

// -- what was heard -----------------------------------------------------------

/// Collects losses from any thread.
class losses {
public:
  auto callback() {
    return [this](const failure& x) {
      std::lock_guard guard{mutex_};
      all_.push_back(x);
      heard_.notify_all();
    };
  }

  /// @returns the n-th loss, or an empty one if it does not come in time.
  failure wait(size_t n = 0, std::chrono::milliseconds limit = 20s) {
    std::unique_lock guard{mutex_};
    if (!heard_.wait_for(guard, limit, [&] { return all_.size() > n; }))
      return {};
    return all_[n];
  }

  size_t size() {
    std::lock_guard guard{mutex_};
    return all_.size();
  }

private:
  std::mutex mutex_;
  std::condition_variable heard_;
  std::vector<failure> all_;
};

// -- a run --------------------------------------------------------------------

/// In bytes, since the process began.
int64_t peak_memory() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return usage.ru_maxrss * 1024;
}

/// Of all runs here; also of those whose ranks are processes.
run_secret shared_secret() {
  return *run_secret::from_hex(std::string(64, '7'));
}

supervisor_host::options run_options(uint64_t world_size, losses& heard) {
  supervisor_host::options result;
  result.world_size = world_size;
  result.run_id = "a run";
  result.secret = shared_secret();
  result.on_rank_down = heard.callback();
  return result;
}

membership::options rank_options(uint64_t rank, uint16_t port, losses& heard) {
  membership::options result;
  result.port = port;
  result.secret = shared_secret();
  result.world_size = 2;
  result.me.rank = rank_id{rank};
  result.me.pid = getpid();
  result.me.host = "here";
  result.me.cores = {static_cast<uint32_t>(rank), 7};
  result.me.run_id = "a run";
  result.me.build = "build 1";
  result.me.settings = "smp.seed = 1\n";
  result.me.fabric_address = std::string{"\0address ", 9}
                             + std::to_string(rank);
  result.on_rank_down = heard.callback();
  return result;
}

/// One rank with an actor system of its own, as in a process of its own.
struct rank {
  explicit rank(membership::options x) : part(host, std::move(x)) {
    // nop
  }

  std::future<std::vector<member>> join() {
    return std::async(std::launch::async, [this] { return part.join(); });
  }

  actor_host host;
  membership part;
};

struct two_ranks {
  explicit two_ranks(supervisor_host::options x)
    : supervisor(host, std::move(x)),
      first(rank_options(0, supervisor.port(), heard[0])),
      second(rank_options(1, supervisor.port(), heard[1])) {
    // nop
  }

  /// Fails the test unless both ranks can take part in the run.
  void join_and_leave() {
    auto a = first.join();
    auto b = second.join();
    CHECK(a.get().size() == 2);
    CHECK(b.get().size() == 2);
    first.part.leave();
    second.part.leave();
  }

  losses heard[2];
  actor_host host;
  supervisor_host supervisor;
  rank first;
  rank second;
};

std::string error_of(std::future<std::vector<member>> x) {
  return test::error_of([&] { x.get(); });
}

// -- a process ----------------------------------------------------------------

/// This program once more, as rank 1 of a run at `port`; killed at the end.
class child {
public:
  explicit child(uint16_t port) {
    auto program = std::string(4096, '\0');
    program.resize(static_cast<size_t>(
      readlink("/proc/self/exe", program.data(), program.size())));
    std::string name = "a child process joins as rank 1";
    setenv("SMP_TEST_PORT", std::to_string(port).c_str(), 1);
    setenv("SMP_TEST_PARENT", std::to_string(getpid()).c_str(), 1);
    char* argv[] = {program.data(), name.data(), nullptr};
    REQUIRE(posix_spawn(&pid_, program.c_str(), nullptr, nullptr, argv, environ)
            == 0);
  }

  ~child() {
    if (pid_ > 0)
      end(SIGKILL);
  }

  void signal(int x) {
    kill(pid_, x);
  }

  /// @returns the exit status as `waitpid` gives it.
  int end(int x) {
    signal(x);
    int status = 0;
    waitpid(std::exchange(pid_, 0), &status, 0);
    return status;
  }

private:
  pid_t pid_ = 0;
};

} // namespace

// -- joining ------------------------------------------------------------------

TEST_CASE("ranks join, learn each other's addresses and leave",
          "[actors][membership]") {
  losses heard;
  two_ranks x{run_options(2, heard)};
  auto first = x.first.join();
  auto second = x.second.join();
  for (auto* y : {&first, &second}) {
    auto members = y->get();
    REQUIRE(members.size() == 2);
    for (uint64_t i = 0; i < 2; ++i) {
      CHECK(members[i].rank == rank_id{i});
      CHECK(members[i].cores
            == std::vector<uint32_t>{static_cast<uint32_t>(i), 7});
      CHECK(members[i].fabric_address
            == std::string{"\0address ", 9} + std::to_string(i));
    }
  }
  x.first.part.leave();
  x.second.part.leave();
  CHECK(heard.size() == 0);
  CHECK(x.heard[0].size() == 0);
  CHECK(x.heard[1].size() == 0);
}

TEST_CASE("rank 0 may host the supervisor in its own actor system",
          "[actors][membership]") {
  losses heard;
  losses heard_by_0;
  losses heard_by_1;
  auto rank_1 = std::optional<rank>{};
  {
    actor_host host;
    supervisor_host supervisor{host, run_options(2, heard)};
    membership part{host, rank_options(0, supervisor.port(), heard_by_0)};
    rank_1.emplace(rank_options(1, supervisor.port(), heard_by_1));
    auto joined = rank_1->join();
    CHECK(part.join().size() == 2);
    CHECK(joined.get().size() == 2);
    part.leave();
    rank_1->part.leave();
  }
  CHECK(heard.size() + heard_by_0.size() + heard_by_1.size() == 0);
}

TEST_CASE("a rank of another build is refused by name on all sides",
          "[actors][membership]") {
  losses heard;
  actor_host host;
  supervisor_host supervisor{host, run_options(2, heard)};
  losses ignored;
  rank first{rank_options(0, supervisor.port(), ignored)};
  auto other = rank_options(1, supervisor.port(), ignored);
  other.me.build = "build 2";
  rank second{std::move(other)};
  auto a = first.join();
  auto b = second.join();
  auto text = error_of(std::move(a));
  CHECK_THAT(text, ContainsSubstring("another build"));
  CHECK_THAT(text, ContainsSubstring("build 1"));
  CHECK_THAT(text, ContainsSubstring("build 2"));
  CHECK_THAT(text, Catch::Matchers::StartsWith("rank 0 (pid")
                     || Catch::Matchers::StartsWith("rank 1 (pid"));
  auto text_of_b = error_of(std::move(b));
  CHECK(text_of_b == text);
  CHECK_THAT(heard.wait().text, ContainsSubstring("another build"));
}

TEST_CASE("a rank of another run is refused and disturbs nobody",
          "[actors][membership]") {
  losses heard;
  two_ranks x{run_options(2, heard)};
  losses ignored;
  auto other = rank_options(1, x.supervisor.port(), ignored);
  other.me.run_id = "another";
  rank stranger{std::move(other)};
  CHECK_THAT(error_of(stranger.join()), ContainsSubstring("another run"));
  x.join_and_leave();
  CHECK(heard.size() == 0);
}

TEST_CASE("a process that does not know the secret of the run does not join",
          "[actors][membership]") {
  losses heard;
  two_ranks x{run_options(2, heard)};
  losses ignored;
  std::string told;
  // On a busy machine no try may end in time, and then nobody said no.
  auto nobody_answered = [&told] {
    return told.empty() || told.ends_with("none")
           || told.find("request_timeout") != told.npos;
  };
  for (int i = 0; i < 5 && nobody_answered(); ++i) {
    auto other = rank_options(1, x.supervisor.port(), ignored);
    other.secret = run_secret::make();
    other.join_limit = 2s;
    rank stranger{std::move(other)};
    told = error_of(stranger.join());
  }
  CHECK_THAT(told, ContainsSubstring("does not know the secret of this run"));
  x.join_and_leave();
  CHECK(heard.size() == 0);
}

// A stranger who speaks CAF's protocol could call every handler of the
// SUPERVISOR: end the run by `down_atom`, switch off its monitor by a goodbye.
TEST_CASE("a stranger who speaks CAF's protocol reaches no actor",
          "[actors][membership]") {
  losses heard;
  two_ranks x{run_options(2, heard)};
  actor_host host;
  auto& system = host.get().system;
  // It waits for a greeting that does not come.
  auto found = std::async(std::launch::async, [&] {
    return static_cast<bool>(system.middleman().remote_actor<supervisor_actor>(
      "127.0.0.1", x.supervisor.port()));
  });
  // Makes room for others: the gate need not wait until he is late.
  std::vector<file_descriptor> silent;
  while (found.wait_for(0s) != std::future_status::ready && silent.size() < 500)
    silent.push_back(test::connect_to(x.supervisor.port()));
  REQUIRE(found.wait_for(30s) == std::future_status::ready);
  CHECK_FALSE(found.get());
  x.join_and_leave();
  CHECK(heard.size() == 0);
}

TEST_CASE("what a stranger claims costs no memory", "[actors][membership]") {
  losses heard;
  two_ranks x{run_options(2, heard)};
  // A header of BASP that announces 4 GB: CAF would allocate them at once.
  std::vector<std::byte> header(32);
  header[0] = std::byte{4};
  std::fill_n(header.begin() + 4, 4, std::byte{0xff});
  auto before = peak_memory();
  std::vector<file_descriptor> strangers;
  for (int i = 0; i < 8; ++i) {
    strangers.push_back(test::connect_to(x.supervisor.port()));
    test::send_bytes(strangers.back().get(), header);
  }
  for (auto& y : strangers)
    CHECK(test::is_closed(y.get()));
  x.join_and_leave();
  CHECK(peak_memory() - before < 100 << 20);
  CHECK(heard.size() == 0);
}

TEST_CASE("1,300 silent connections keep no rank from joining",
          "[actors][membership]") {
  constexpr size_t many = 1300;
  test::descriptor_limit enough{2 * many};
  losses heard;
  two_ranks x{run_options(2, heard)};
  auto before = test::open_descriptors().size();
  std::vector<file_descriptor> silent;
  for (size_t i = 0; i < many; ++i)
    silent.push_back(test::connect_to(x.supervisor.port()));
  x.join_and_leave();
  CHECK(test::open_descriptors().size() < before + many + 100);
  CHECK(heard.size() == 0);
}

TEST_CASE("a rank that does not come is named when the time is over",
          "[actors][membership]") {
  losses heard;
  auto options = run_options(3, heard);
  options.join_limit = 300ms;
  actor_host host;
  supervisor_host supervisor{host, std::move(options)};
  losses ignored;
  rank first{rank_options(1, supervisor.port(), ignored)};
  // On a busy machine rank 1 may come too late as well.
  CHECK_THAT(error_of(first.join()),
             ContainsSubstring("ranks 0, ")
               && ContainsSubstring("2 did not join within 0.3 s"));
  CHECK_THAT(heard.wait().text, ContainsSubstring("ranks 0, "));
}

TEST_CASE("a supervisor that is not there is named", "[actors][membership]") {
  uint16_t port = 0;
  losses ignored;
  {
    actor_host host;
    port = supervisor_host{host, run_options(1, ignored)}.port();
  }
  auto options = rank_options(0, port, ignored);
  options.join_limit = 200ms;
  rank lonely{std::move(options)};
  CHECK_THAT(error_of(lonely.join()),
             ContainsSubstring("rank 0 could not reach the SUPERVISOR at"
                               " 127.0.0.1:"
                               + std::to_string(port)));
}

TEST_CASE("the control plane refuses addresses that others can reach",
          "[actors][membership]") {
  losses ignored;
  actor_host host;
  auto options = run_options(1, ignored);
  options.address = "0.0.0.0";
  CHECK_THROWS_WITH((supervisor_host{host, options}),
                    ContainsSubstring("0.0.0.0")
                      && ContainsSubstring("smp-train keys"));
}

TEST_CASE("a port that is taken is a clear error", "[actors][membership]") {
  losses ignored;
  actor_host host;
  supervisor_host first{host, run_options(1, ignored)};
  auto options = run_options(1, ignored);
  options.port = first.port();
  actor_host other;
  CHECK_THROWS_WITH((supervisor_host{other, options}),
                    ContainsSubstring("cannot listen on 127.0.0.1:"));
}

// -- losses -------------------------------------------------------------------

TEST_CASE("a rank that ends without goodbye is lost", "[actors][membership]") {
  losses heard;
  auto options = run_options(2, heard);
  options.report_grace = 0ms;
  actor_host host;
  supervisor_host supervisor{host, std::move(options)};
  losses heard_by_0;
  losses ignored;
  rank first{rank_options(0, supervisor.port(), heard_by_0)};
  {
    rank second{rank_options(1, supervisor.port(), ignored)};
    auto joined = first.join();
    second.join().get();
    joined.get();
  }
  auto cause = heard_by_0.wait();
  CHECK(cause.code == error_code::rank_down);
  CHECK(cause.rank == rank_id{1});
  CHECK(heard.wait() == cause);
  CHECK(ignored.size() == 0);
}

TEST_CASE("the launcher's report wins over the broken connection",
          "[actors][membership]") {
  // By a failure, or by a result that came too early.
  const bool failed = GENERATE(true, false);
  CAPTURE(failed);
  losses heard;
  auto options = run_options(2, heard);
  options.report_grace = 60s; // longer than any wait here
  actor_host host;
  supervisor_host supervisor{host, std::move(options)};
  losses heard_by_0;
  losses ignored;
  rank first{rank_options(0, supervisor.port(), heard_by_0)};
  {
    rank second{rank_options(1, supervisor.port(), ignored)};
    auto joined = first.join();
    second.join().get();
    joined.get();
  }
  auto cause = failure{
    error_code::rank_down, rank_id{1}, {}, "killed by signal 9 (SIGKILL)"};
  if (failed)
    supervisor.report_down(cause);
  else
    supervisor.report_result(cause);
  supervisor.report_down({error_code::rank_down, rank_id{1}, {}, "later"});
  CHECK(heard_by_0.wait() == cause);
  CHECK(heard.wait() == cause);
  CHECK(heard.size() == 1);
}

TEST_CASE("a rank that ends with a result after its goodbye is not lost",
          "[actors][membership]") {
  losses heard;
  {
    two_ranks x{run_options(2, heard)};
    x.join_and_leave();
    x.supervisor.report_result({error_code::rank_down, rank_id{1}, {}, "0"});
  }
  CHECK(heard.size() == 0);
}

TEST_CASE("a rank that ends before it joins ends the wait of others",
          "[actors][membership]") {
  losses heard;
  actor_host host;
  supervisor_host supervisor{host, run_options(2, heard)};
  // Before anybody waits, it may be a program without a session.
  supervisor.report_result({error_code::rank_down, rank_id{1}, {}, "code 0"});
  losses ignored;
  rank first{rank_options(0, supervisor.port(), ignored)};
  CHECK(error_of(first.join()) == "rank 1: code 0");
  CHECK(heard.wait().text == "code 0");
}

TEST_CASE("a rank that dies while others still join ends their wait",
          "[actors][membership]") {
  losses heard;
  actor_host host;
  supervisor_host supervisor{host, run_options(2, heard)};
  losses ignored;
  rank first{rank_options(0, supervisor.port(), ignored)};
  auto joined = first.join();
  supervisor.report_down(
    {error_code::rank_down, rank_id{1}, {}, "exit code 2"});
  auto told = error_of(std::move(joined));
  CHECK(told == "rank 1: exit code 2");
}

TEST_CASE("the loss of the supervisor is reported", "[actors][membership]") {
  losses heard;
  losses heard_by_0;
  auto host = std::make_unique<actor_host>();
  auto options = run_options(1, heard);
  auto supervisor = std::make_unique<supervisor_host>(*host, options);
  auto mine = rank_options(0, supervisor->port(), heard_by_0);
  mine.world_size = 1;
  rank first{std::move(mine)};
  first.join().get();
  supervisor->report_down( // a failed run waits for nobody
    {error_code::rank_down, rank_id{0}, {}, "gone"});
  CHECK(heard.wait().text == "gone");
  supervisor.reset();
  host.reset();
  CHECK_THAT(heard_by_0.wait().text,
             ContainsSubstring("SUPERVISOR") && ContainsSubstring("is lost"));
}

// -- processes ----------------------------------------------------------------

TEST_CASE("a child process joins as rank 1", "[.child]") {
  // Ends with its parent, whatever happens to that.
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != std::atoi(std::getenv("SMP_TEST_PARENT")))
    return;
  losses heard;
  rank me{rank_options(
    1, static_cast<uint16_t>(std::atoi(std::getenv("SMP_TEST_PORT"))), heard)};
  me.join().get();
  pause();
}

namespace {

/// @returns how long it takes until rank 0 hears of the end of a process
std::chrono::milliseconds end_of_process(bool launcher_tells) {
  losses heard;
  losses heard_by_0;
  auto options = run_options(2, heard);
  // How long it waits for the launcher's better cause: longer than any wait
  // here, or a part of what a report may take.
  options.report_grace = launcher_tells ? 60s : 200ms;
  actor_host host;
  supervisor_host supervisor{host, std::move(options)};
  rank first{rank_options(0, supervisor.port(), heard_by_0)};
  child second{supervisor.port()};
  auto members = first.join().get();
  REQUIRE(members.size() == 2);
  CHECK(members[1].pid != members[0].pid);
  auto begin = std::chrono::steady_clock::now();
  auto status = second.end(SIGKILL);
  CHECK(WTERMSIG(status) == SIGKILL);
  if (launcher_tells)
    supervisor.report_down(
      {error_code::rank_down, rank_id{1}, {}, "killed by signal 9 (SIGKILL)"});
  auto cause = heard_by_0.wait();
  auto took = std::chrono::steady_clock::now() - begin;
  REQUIRE(cause.rank == rank_id{1});
  if (launcher_tells)
    CHECK(cause.text == "killed by signal 9 (SIGKILL)");
  else
    CHECK_THAT(cause.text, ContainsSubstring("connection broke"));
  CHECK(heard.wait() == cause);
  CHECK(heard_by_0.size() == 1);
  return std::chrono::ceil<std::chrono::milliseconds>(took);
}

} // namespace

TEST_CASE("a killed process is reported within two seconds",
          "[actors][membership]") {
  // By its broken connection, or by its launcher, with the better cause.
  auto launcher_tells = GENERATE(false, true);
  CAPTURE(launcher_tells);
  auto took = test::best_of<std::chrono::milliseconds>(
    3, 2s, [&] { return end_of_process(launcher_tells); });
  CHECK(took < 2s);
}
