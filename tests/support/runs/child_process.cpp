#include "tests/support/runs/child_process.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <system_error>
#include <vector>

extern char** environ;

namespace smp::test {

namespace {

constexpr const char* socket_variable = "SMP_TEST_SOCKET";
constexpr size_t packet_limit = 1 << 16;

[[noreturn]] void fail(const char* what) {
  throw std::system_error(errno, std::generic_category(), what);
}

void send_packet(int socket, const std::string& x) {
  if (::send(socket, x.data(), x.size(), MSG_NOSIGNAL) < 0)
    fail("send");
}

std::optional<std::string> receive_packet(int socket) {
  std::string buffer(packet_limit, '\0');
  auto size = ::recv(socket, buffer.data(), buffer.size(), 0);
  if (size <= 0)
    return std::nullopt;
  buffer.resize(static_cast<size_t>(size));
  return buffer;
}

} // namespace

child_process::child_process(const std::string& test_case,
                             std::map<std::string, std::string> environment) {
  int sockets[2];
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, sockets) != 0)
    fail("socketpair");
  // All is prepared before the fork: this program has threads.
  environment[socket_variable] = std::to_string(sockets[1]);
  std::vector<std::string> variables;
  for (auto x = environ; *x != nullptr; ++x) {
    std::string variable = *x;
    if (!environment.contains(variable.substr(0, variable.find('='))))
      variables.push_back(std::move(variable));
  }
  for (auto& [name, value] : environment)
    if (!value.empty())
      variables.push_back(name + '=' + value);
  std::vector<char*> env;
  for (auto& x : variables)
    env.push_back(x.data());
  env.push_back(nullptr);
  std::string program = "/proc/self/exe";
  std::string name = test_case;
  std::string brief = "--reporter=compact";
  char* arguments[] = {program.data(), name.data(), brief.data(), nullptr};
  auto parent = ::getpid();
  pid_ = ::fork();
  if (pid_ < 0)
    fail("fork");
  if (pid_ == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (::getppid() != parent)
      ::_exit(127);
    // Nothing else is inherited: a descriptor that stays open would hide the
    // end of its owner.
    ::dup2(::open("/dev/null", O_RDONLY), STDIN_FILENO);
    for (int i = STDERR_FILENO + 1; i < 1024; ++i)
      if (i != sockets[1])
        ::close(i);
    ::fcntl(sockets[1], F_SETFD, 0);
    ::execve(program.c_str(), arguments, env.data());
    ::_exit(127);
  }
  ::close(sockets[1]);
  socket_ = sockets[0];
}

child_process::~child_process() {
  if (!status_) {
    ::kill(pid_, SIGKILL);
    join();
  }
  ::close(socket_);
}

void child_process::tell(const std::string& x) {
  send_packet(socket_, x);
}

std::optional<std::string>
child_process::hear(std::chrono::milliseconds limit) {
  pollfd x{socket_, POLLIN, 0};
  if (::poll(&x, 1, static_cast<int>(limit.count())) != 1)
    return std::nullopt;
  return receive_packet(socket_);
}

void child_process::signal(int x) {
  ::kill(pid_, x);
  siginfo_t stopped{};
  if (x == SIGSTOP)
    ::waitid(P_PID, static_cast<id_t>(pid_), &stopped,
             WSTOPPED | WEXITED | WNOWAIT);
  if (x == SIGKILL)
    join();
}

int child_process::join() {
  if (!status_) {
    int status = 0;
    while (::waitpid(pid_, &status, 0) < 0 && errno == EINTR) {
      // again
    }
    status_ = WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  }
  return *status_;
}

bool parent_process::exists() {
  return std::getenv(socket_variable) != nullptr;
}

parent_process::parent_process()
  : socket_(std::atoi(std::getenv(socket_variable))) {
  // nop
}

void parent_process::tell(const std::string& x) {
  send_packet(socket_, x);
}

std::string parent_process::hear() {
  auto result = receive_packet(socket_);
  if (!result)
    throw std::runtime_error("the parent is gone");
  return *result;
}

} // namespace smp::test
