#include "tests/support/runs/program.hpp"

#include "tests/support/catch.hpp"

#include <cstdlib>
#include <fstream>
#include <iterator>

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

namespace smp::test {

namespace {

using clock = std::chrono::steady_clock;

std::string from_environment(const char* name) {
  auto value = std::getenv(name);
  if (value == nullptr)
    FAIL(name << " is not set: run this test with ctest");
  return value;
}

} // namespace

program::program(std::vector<std::string> command,
                 std::filesystem::path directory,
                 std::map<std::string, std::string> environment) {
  int fds[2];
  REQUIRE(::pipe2(fds, O_CLOEXEC) == 0);
  std::vector<char*> argv;
  for (auto& x : command)
    argv.push_back(x.data());
  argv.push_back(nullptr);
  pid_ = ::fork();
  REQUIRE(pid_ >= 0);
  if (pid_ == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    // A shell makes its background jobs, perhaps us, ignore it.
    ::signal(SIGINT, SIG_DFL);
    ::dup2(fds[1], STDOUT_FILENO);
    ::dup2(fds[1], STDERR_FILENO);
    for (auto& [name, value] : environment)
      ::setenv(name.c_str(), value.c_str(), 1);
    if (::chdir(directory.c_str()) == 0)
      ::execvp(argv[0], argv.data());
    ::_exit(127);
  }
  ::close(fds[1]);
  output_fd_ = fds[0];
}

program::~program() {
  if (pid_ > 0) {
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }
  ::close(output_fd_);
}

bool program::read_some(clock::time_point deadline) {
  auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
    deadline - clock::now());
  pollfd fd{output_fd_, POLLIN, 0};
  if (left.count() <= 0 || ::poll(&fd, 1, static_cast<int>(left.count())) <= 0)
    return false;
  char buf[4096];
  auto n = ::read(output_fd_, buf, sizeof(buf));
  if (n <= 0)
    return false;
  output_.append(buf, static_cast<size_t>(n));
  return true;
}

bool program::wait_for(const std::string& text,
                       std::chrono::milliseconds limit) {
  const auto deadline = clock::now() + limit;
  while (output_.find(text) == std::string::npos)
    if (!read_some(deadline))
      return false;
  return true;
}

void program::signal(int number) {
  ::kill(pid_, number);
}

int program::join(std::chrono::milliseconds limit) {
  const auto deadline = clock::now() + limit;
  while (read_some(deadline)) {
    // Until the last of its processes closed the pipe.
  }
  if (clock::now() >= deadline)
    ::kill(pid_, SIGKILL);
  int status = 0;
  ::waitpid(pid_, &status, 0);
  pid_ = -1;
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

std::string program::finish(int expected) {
  auto code = join();
  INFO(output());
  REQUIRE(code == expected);
  return output();
}

std::vector<std::string> this_program(const std::string& test) {
  return {std::filesystem::read_symlink("/proc/self/exe"), test};
}

std::string built_program(const std::string& name) {
  return from_environment("SMP_BIN_DIR") + "/" + name;
}

std::string source_file(const std::string& path) {
  return from_environment("SMP_SOURCE_DIR") + "/" + path;
}

std::string content_of(const std::filesystem::path& path) {
  std::ifstream file{path, std::ios::binary};
  if (!file)
    FAIL("cannot read " << path);
  return {std::istreambuf_iterator<char>{file}, {}};
}

} // namespace smp::test
