// ctest: label=multiprocess
#include "tests/support/catch.hpp"

#include "runtime/files/file_io.hpp"
#include "runtime/launch/shared_segments.hpp"
#include "runtime/process/limits.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/runs/program.hpp"
#include "tests/support/scratch_dir.hpp"

#include <boost/system/system_error.hpp>

#include <fmt/format.h>

#include <cerrno>
#include <csignal>
#include <filesystem>
#include <functional>
#include <new>
#include <sstream>
#include <stdexcept>
#include <string>
#include <system_error>

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

using namespace smp;
using namespace smp::test;
using Catch::Matchers::ContainsSubstring;

namespace {

/// @returns how many segments of System V this process made that are there
size_t own_segments() {
  std::istringstream lines{content_of("/proc/sysvipc/shm")};
  size_t result = 0;
  for (std::string line; std::getline(lines, line);) {
    std::istringstream columns{line};
    std::string key, id, permissions, size, maker;
    columns >> key >> id >> permissions >> size >> maker;
    result += maker == std::to_string(::getpid());
  }
  return result;
}

/// @returns what `f` returns in a process of its own, where it can change
/// limits
std::string apart(const std::function<std::string()>& f) {
  int ends[2];
  REQUIRE(::pipe(ends) == 0);
  auto pid = ::fork();
  if (pid == 0) {
    auto text = f();
    auto ignored = ::write(ends[1], text.data(), text.size());
    static_cast<void>(ignored);
    ::_exit(0);
  }
  ::close(ends[1]);
  std::string result(4096, '\0');
  auto size = ::read(ends[0], result.data(), result.size());
  ::close(ends[0]);
  int status = 0;
  REQUIRE(::waitpid(pid, &status, 0) == pid);
  CHECK(status == 0);
  result.resize(size > 0 ? static_cast<size_t>(size) : 0);
  return result;
}

template <class Resource>
void set_limit(Resource resource, rlim_t soft, rlim_t hard) {
  const rlimit limit{soft, hard};
  ::setrlimit(resource, &limit);
}

std::string refusal(uint64_t ranks) {
  return error_of([=] { check_limits(ranks); }, error_code::config);
}

} // namespace

TEST_CASE("too few descriptors are an error before anything starts",
          "[runtime][limits]") {
  auto told = apart([] {
    set_limit(RLIMIT_NOFILE, 20, 20);
    return refusal(2);
  });
  CHECK_THAT(told, ContainsSubstring("ulimit -n") && ContainsSubstring("is 20")
                     && ContainsSubstring("2 ranks needs 48"));
  CHECK(refusal(2) == "no error");
}

TEST_CASE("descriptors that a process may take are taken",
          "[runtime][limits]") {
  auto told = apart([] {
    rlimit before{};
    ::getrlimit(RLIMIT_NOFILE, &before);
    set_limit(RLIMIT_NOFILE, 20, before.rlim_max);
    use_limits();
    return refusal(2);
  });
  CHECK(told == "no error");
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
TEST_CASE("too little memory is an error before anything starts",
          "[runtime][limits]") {
  auto [resource, option] = GENERATE(table<int, std::string>(
    {{RLIMIT_AS, "ulimit -v"}, {RLIMIT_DATA, "ulimit -d"}}));
  auto told = apart([&] {
    // Less than there is already.
    if (resource == RLIMIT_AS)
      set_limit(RLIMIT_AS, 1 << 20, 1 << 20);
    else
      set_limit(RLIMIT_DATA, 1 << 20, 1 << 20);
    return refusal(2);
  });
  CHECK_THAT(told, ContainsSubstring(option) && ContainsSubstring("is 1 MB"));
}
#endif

TEST_CASE("a file that becomes too large is an error, not a signal",
          "[runtime][limits]") {
  scratch_dir dir;
  auto told = apart([&] {
    use_limits();
    set_limit(RLIMIT_FSIZE, 100, 100);
    return error_of([&] { write_text(dir.path / "x", std::string(200, 'x')); },
                    error_code::config);
  });
  CHECK_THAT(told, ContainsSubstring("cannot write")
                     && ContainsSubstring("File too large"));
}

TEST_CASE("exceptions that tell of a limit are told from others",
          "[runtime][limits]") {
  auto text = [](const std::exception& x) {
    auto y = exhausted_limit(x);
    return y ? std::string{y->what()} : "";
  };
  auto code = [](int x) { return std::error_code{x, std::generic_category()}; };
  CHECK_THAT(text(std::bad_alloc{}), ContainsSubstring("no more memory"));
  CHECK_THAT(text(std::system_error{code(EAGAIN)}),
             ContainsSubstring("no more threads"));
  CHECK_THAT(text(std::system_error{code(EMFILE), "pipe"}),
             ContainsSubstring("no more open files (pipe"));
  CHECK_THAT(text(boost::system::system_error{
               EMFILE, boost::system::system_category(), "pipe"}),
             ContainsSubstring("no more open files"));
  CHECK(text(std::system_error{code(EPERM)}).empty());
  CHECK(text(std::runtime_error{"no luck"}).empty());
}

TEST_CASE("shared memory is used where it has room for all ranks",
          "[runtime][limits]") {
  CHECK_FALSE(no_room_for_shared_memory("/tmp", 1));
  auto why = no_room_for_shared_memory("/tmp", uint64_t{1} << 40);
  REQUIRE(why);
  CHECK_THAT(*why, ContainsSubstring("/tmp has")
                     && ContainsSubstring("ranks of this machine need"));
  CHECK(no_room_for_shared_memory("/nonexistent", 1)
        == "there is no /nonexistent");
}

TEST_CASE("shared memory of System V is asked for and given back",
          "[runtime][limits]") {
  auto before = own_segments();
  CHECK(system_v_has_room(2));
  CHECK_FALSE(system_v_has_room(uint64_t{1} << 40));
  CHECK(own_segments() == before);
}

TEST_CASE("what ranks of this run hold of shared memory counts as free",
          "[runtime][limits]") {
  // What UCX does, at the time of a rank that begins later.
  const auto folder = fmt::format("/dev/shm/smp-limits-{}", ::getpid());
  std::filesystem::create_directory(folder);
  program rank{
    {"sh", "-c",
     "exec 3> ucx_shm_posix_7 4> other; head -c 1000000 /dev/zero "
     ">&3; head -c 1000000 /dev/zero >&4; rm ucx_shm_posix_7; "
     "echo ready; exec tail -f /dev/null"},
    folder,
    {{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"TORCHELASTIC_RUN_ID", folder}}};
  REQUIRE(rank.wait_for("ready"));
  auto run = folder + "-127.0.0.1-0";
  CHECK(held_by_run(folder, run) >= 1'000'000);
  CHECK(held_by_run(folder, run) < 1'100'000);
  CHECK(held_by_run(folder, "another run") == 0);
  // It is in another file system.
  CHECK(held_by_run("/proc", run) == 0);
  rank.signal(SIGKILL);
  rank.join();
  CHECK(held_by_run(folder, run) == 0);
  std::filesystem::remove_all(folder);
}
