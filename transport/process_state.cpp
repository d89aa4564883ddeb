#include "transport/process_state.hpp"

#include <cstring>
#include <fstream>
#include <iterator>
#include <sstream>

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

namespace smp {

std::string process_end::describe() const {
  if (signal == 0)
    return "exited with code " + std::to_string(code);
  auto name = ::sigabbrev_np(signal);
  auto result = "killed by signal " + std::to_string(signal);
  return name == nullptr ? result : result + " (SIG" + name + ')';
}

process_end end_of_status(int status) noexcept {
  if (WIFSIGNALED(status))
    return {128 + WTERMSIG(status), WTERMSIG(status)};
  return {WEXITSTATUS(status), 0};
}

std::optional<process_state> state_of_process(int64_t pid) {
  std::ifstream file{"/proc/" + std::to_string(pid) + "/stat"};
  std::string text{std::istreambuf_iterator<char>{file}, {}};
  auto name_end = text.rfind(')'); // the name may contain blanks
  if (name_end == std::string::npos)
    return std::nullopt;
  std::istringstream rest{text.substr(name_end + 1)};
  process_state result;
  rest >> result.letter; // field 3, see proc(5)
  std::string field;
  for (int i = 4; i < 9; ++i)
    rest >> field;
  constexpr uint64_t pf_exiting = 4; // include/linux/sched.h
  uint64_t flags = 0;
  rest >> flags;
  result.exiting = (flags & pf_exiting) != 0;
  for (int i = 10; i < 22; ++i)
    rest >> field;
  rest >> result.start_time;
  if (!rest)
    return std::nullopt;
  for (int i = 23; i < 52; ++i)
    rest >> field;
  if (int status = 0; rest >> status)
    result.end = end_of_status(status);
  return result;
}

process_memory memory_of_this_process() {
  process_memory result;
  std::ifstream file{"/proc/self/statm"};
  uint64_t pages = 0;
  if (file >> pages >> pages)
    result.now = pages * static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  result.peak = static_cast<uint64_t>(usage.ru_maxrss) * 1024;
  return result;
}

std::string host_name() {
  char name[256] = {};
  ::gethostname(name, sizeof(name) - 1);
  return name;
}

} // namespace smp
