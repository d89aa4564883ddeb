#include "tests/support/runs/processes.hpp"

#include "tests/support/catch.hpp"

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string>
#include <system_error>

#include <poll.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace smp::test {

namespace {

std::string file_of(pid_t x, const std::string& name) {
  std::ifstream in{"/proc/" + std::to_string(x) + '/' + name};
  return {std::istreambuf_iterator<char>{in}, {}};
}

} // namespace

bool ended_within(pid_t x, std::chrono::milliseconds limit) {
  auto fd = static_cast<int>(::syscall(SYS_pidfd_open, x, 0));
  if (fd < 0) {
    REQUIRE(errno == ESRCH);
    return true;
  }
  pollfd end{fd, POLLIN, 0};
  auto ready = ::poll(&end, 1, static_cast<int>(limit.count()));
  ::close(fd);
  return ready > 0;
}

bool is_gone(pid_t x) {
  return ::kill(x, 0) != 0 && errno == ESRCH;
}

std::vector<pid_t> children_of(pid_t x) {
  std::istringstream in{file_of(x, "task/" + std::to_string(x) + "/children")};
  return {std::istream_iterator<pid_t>{in}, {}};
}

bool has_variable(pid_t x, const std::string& name) {
  return ('\0' + file_of(x, "environ")).find('\0' + name + '=')
         != std::string::npos;
}

double cpu_seconds_of(pid_t x) {
  auto text = file_of(x, "stat");
  auto name_end = text.rfind(')'); // the name may contain blanks
  if (name_end == std::string::npos)
    return 0;
  std::istringstream rest{text.substr(name_end + 1)};
  std::string skipped;
  for (int i = 3; i < 14; ++i) // see proc(5)
    rest >> skipped;
  double user = 0;
  double kernel = 0;
  rest >> user >> kernel;
  return (user + kernel) / static_cast<double>(::sysconf(_SC_CLK_TCK));
}

std::set<uint16_t> listening_ports_of(pid_t x) {
  std::set<std::string> sockets; // as /proc/PID/fd shows them
  auto folder = "/proc/" + std::to_string(x) + "/fd";
  for (auto& entry : std::filesystem::directory_iterator{folder}) {
    std::error_code gone;
    sockets.insert(std::filesystem::read_symlink(entry.path(), gone));
  }
  std::set<uint16_t> result;
  for (auto name : {"net/tcp", "net/tcp6"}) {
    std::istringstream in{file_of(x, name)};
    std::string line;
    std::getline(in, line); // the names of the columns
    while (std::getline(in, line)) {
      std::istringstream fields{line};
      std::vector<std::string> at{std::istream_iterator<std::string>{fields},
                                  {}};
      constexpr auto listens = "0A"; // see proc(5)
      if (at.size() > 9 && at[3] == listens
          && sockets.contains("socket:[" + at[9] + "]"))
        result.insert(static_cast<uint16_t>(
          std::stoul(at[1].substr(at[1].rfind(':') + 1), nullptr, 16)));
    }
  }
  return result;
}

void let_pass(std::chrono::milliseconds x) {
  ::poll(nullptr, 0, static_cast<int>(x.count()));
}

} // namespace smp::test
