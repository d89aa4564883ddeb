#include "runtime/process/process.hpp"

#include "transport/error.hpp"
#include "transport/files/file_descriptor.hpp"

#include <fmt/format.h>

#include <cerrno>
#include <chrono>
#include <climits>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <string_view>
#include <thread>
#include <utility>

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

extern char** environ;

namespace smp {

namespace {

[[noreturn]] void fail(const std::string& program, int why) {
  throw error{error_code::config,
              fmt::format("cannot start {}: {}", program, std::strerror(why))};
}

std::string find_program(const std::string& name) {
  if (name.find('/') != std::string::npos)
    return name;
  auto path = std::getenv("PATH");
  std::string_view rest = path != nullptr ? path : "/usr/bin:/bin";
  for (;;) {
    auto colon = rest.find(':');
    auto candidate = fmt::format("{}/{}", rest.substr(0, colon), name);
    if (::access(candidate.c_str(), X_OK) == 0)
      return candidate;
    if (colon == std::string_view::npos)
      fail(name, ENOENT);
    rest.remove_prefix(colon + 1);
  }
}

std::vector<std::string>
merged_environment(std::map<std::string, std::string> set) {
  std::vector<std::string> result;
  for (auto entry = environ; *entry != nullptr; ++entry) {
    std::string_view text{*entry};
    if (!set.contains(std::string{text.substr(0, text.find('='))}))
      result.emplace_back(text);
  }
  for (auto& [name, value] : set)
    result.push_back(name + "=" + value);
  return result;
}

std::vector<char*> pointers(std::vector<std::string>& xs) {
  std::vector<char*> result;
  for (auto& x : xs)
    result.push_back(x.data());
  result.push_back(nullptr);
  return result;
}

/// What the child needs, made before fork: after it, only async-signal-safe
/// functions may be called, as another thread may hold any lock.
struct child_plan {
  const char* program;
  char** arguments;
  char** environment;
  int out;
  int err;
  const int* kept;
  size_t kept_count;
  int blocked;
  int null;
  int report; // takes errno if exec fails
  pid_t parent;
};

/// dup2 that also works if the descriptor already has that number.
bool become(int from, int to) {
  if (from == to)
    return ::fcntl(to, F_SETFD, 0) == 0;
  return ::dup2(from, to) == to;
}

/// Handlers of this process must not run in the child. Ignored signals stay
/// ignored (nohup), except SIGPIPE, which libraries ignore for themselves, and
/// SIGINT, which scripts ignore for what they start in the background: by it
/// the launcher passes on that the run is to end.
void reset_signals() {
  for (int number = 1; number < NSIG; ++number) {
    struct sigaction now {};
    if (::sigaction(number, nullptr, &now) != 0)
      continue;
    if (number == SIGPIPE || number == SIGINT || now.sa_handler != SIG_IGN)
      ::signal(number, SIG_DFL);
  }
}

[[noreturn]] void run_child(const child_plan& x) {
  ::setpgid(0, 0);
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != x.parent) // it died before the line above
    ::_exit(127);
  bool ready = become(x.null, 0) && become(x.out, 1) && become(x.err, 2);
  if (ready) {
    ::close_range(3, UINT_MAX, CLOSE_RANGE_CLOEXEC);
    for (size_t i = 0; i < x.kept_count; ++i)
      ::fcntl(x.kept[i], F_SETFD, 0);
    reset_signals();
    sigset_t blocked;
    ::sigemptyset(&blocked);
    if (x.blocked != 0)
      ::sigaddset(&blocked, x.blocked);
    ::sigprocmask(SIG_SETMASK, &blocked, nullptr);
    ::execve(x.program, x.arguments, x.environment);
  }
  int why = errno;
  auto ignored = ::write(x.report, &why, sizeof(why));
  static_cast<void>(ignored);
  ::_exit(127);
}

} // namespace

pid_t spawn(const spawn_options& x) {
  auto program = find_program(x.program);
  auto arguments = x.arguments;
  auto environment = merged_environment(x.environment);
  auto argv = pointers(arguments);
  auto envp = pointers(environment);
  file_descriptor null{::open("/dev/null", O_RDONLY | O_CLOEXEC)};
  int ends[2];
  if (!null || ::pipe2(ends, O_CLOEXEC) != 0)
    fail(program, errno);
  file_descriptor read_end{ends[0]};
  file_descriptor write_end{ends[1]};
  child_plan plan{program.c_str(), argv.data(),     envp.data(),   x.out,
                  x.err,           x.kept.data(),   x.kept.size(), x.blocked,
                  null.get(),      write_end.get(), ::getpid()};
  // Between fork and reset_signals a handler of ours would talk to the parent
  // through shared descriptors.
  sigset_t all;
  sigset_t before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  auto pid = ::fork();
  if (pid == 0)
    run_child(plan);
  auto fork_error = errno;
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (pid < 0)
    fail(program, fork_error);
  ::setpgid(pid, pid); // either may be first
  write_end.reset();
  int why = 0;
  ssize_t got = 0;
  do
    got = ::read(read_end.get(), &why, sizeof(why));
  while (got < 0 && errno == EINTR);
  if (got == sizeof(why)) {
    ::waitpid(pid, nullptr, 0);
    fail(program, why);
  }
  return pid;
}

bool is_ignored(int signal) {
  struct sigaction now {};
  return ::sigaction(signal, nullptr, &now) == 0 && now.sa_handler == SIG_IGN;
}

std::optional<process_end> reap(pid_t pid) {
  siginfo_t info{};
  if (::waitid(P_PID, static_cast<id_t>(pid), &info,
               WEXITED | WNOHANG | WNOWAIT)
        != 0
      || info.si_pid != pid)
    return std::nullopt;
  // While the zombie exists, no other process can get its number.
  ::kill(-pid, SIGKILL);
  int status = 0;
  ::waitpid(pid, &status, 0);
  return end_of_status(status);
}

bool reap_group(pid_t pid) {
  auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds{2};
  for (;;) {
    auto gone = ::waitpid(-pid, nullptr, WNOHANG);
    if (gone < 0 && errno == ECHILD)
      return true;
    if (gone > 0)
      continue;
    if (std::chrono::steady_clock::now() > deadline)
      return false;
    std::this_thread::sleep_for(std::chrono::milliseconds{1});
  }
}

} // namespace smp
