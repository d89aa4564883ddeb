#include "runtime/process/limits.hpp"

#include "runtime/files/file_io.hpp"
#include "transport/files/file_descriptor.hpp"

#include <boost/system/system_error.hpp>
#include <fmt/format.h>

#include <cerrno>
#include <csignal>
#include <cstring>
#include <new>
#include <sstream>
#include <string>
#include <system_error>

#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>

namespace smp {

namespace {

constexpr uint64_t mb_bytes = uint64_t{1} << 20;

/// Open files of a rank, or of the launcher, apart from those for each other
/// rank. (Measured: 24 with two ranks.)
constexpr uint64_t files_alone = 32;
constexpr uint64_t files_per_rank = 8;

/// What the threads of a rank and its first steps take in addition to the
/// model. (Measured: stacks of 8 MB and their arenas count as address space.)
constexpr uint64_t wanted_address_space = 384 * mb_bytes;
constexpr uint64_t wanted_data = 128 * mb_bytes;

/// @returns a value of /proc/self/status, in bytes.
uint64_t own_size(const std::string& name) {
  std::istringstream in{try_read("/proc/self/status").value_or("")};
  for (std::string line; std::getline(in, line);)
    if (line.starts_with(name + ":"))
      return std::stoull(line.substr(name.size() + 1)) * 1024;
  return 0;
}

void check_memory(decltype(RLIMIT_AS) resource, const char* option,
                  const std::string& used, uint64_t wanted) {
  rlimit limit{};
  if (::getrlimit(resource, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY)
    return;
  auto now = own_size(used);
  auto left = limit.rlim_cur > now ? limit.rlim_cur - now : 0;
  if (left < wanted)
    throw config_error(fmt::format(
      "the limit of memory (ulimit {}) is {} MB, of which this "
      "process has {} MB before it begins; a rank needs {} MB more, "
      "and its model comes on top",
      option, limit.rlim_cur / mb_bytes, now / mb_bytes, wanted / mb_bytes));
}

} // namespace

void use_limits() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) == 0
      && limit.rlim_cur < limit.rlim_max) {
    limit.rlim_cur = limit.rlim_max;
    ::setrlimit(RLIMIT_NOFILE, &limit); // not worth an error
  }
  ::signal(SIGXFSZ, SIG_IGN);
}

void check_limits(uint64_t ranks) {
  rlimit files{};
  auto wanted = files_alone + files_per_rank * ranks;
  if (::getrlimit(RLIMIT_NOFILE, &files) == 0 && files.rlim_cur < wanted)
    throw config_error(
      fmt::format("the limit of open files (ulimit -n) is {}; a run of {} "
                  "ranks needs {}",
                  files.rlim_cur, ranks, wanted));
  check_memory(RLIMIT_AS, "-v", "VmSize", wanted_address_space);
  check_memory(RLIMIT_DATA, "-d", "VmData", wanted_data);
}

void check_loopback() {
  file_descriptor socket{::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0)};
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(1); // any: nothing is sent
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (socket
      && ::connect(socket.get(), reinterpret_cast<sockaddr*>(&address),
                   sizeof(address))
           != 0)
    throw config_error(
      fmt::format("127.0.0.1: {}: ranks of one machine meet there; the "
                  "loopback interface is down (ip link set lo up)",
                  std::strerror(errno)));
}

std::optional<error> exhausted_limit(const std::exception& x) {
  int code = 0;
  if (dynamic_cast<const std::bad_alloc*>(&x) != nullptr)
    code = ENOMEM;
  else if (auto* y = dynamic_cast<const std::system_error*>(&x))
    code = y->code().value();
  else if (auto* z = dynamic_cast<const boost::system::system_error*>(&x))
    code = z->code().value();
  switch (code) {
    case ENOMEM:
      return config_error(
        fmt::format("no more memory ({}): see ulimit -a, and what the machine "
                    "and its control group allow",
                    x.what()));
    case EAGAIN:
      return config_error(fmt::format(
        "no more threads ({}): see ulimit -u and ulimit -v", x.what()));
    case EMFILE:
    case ENFILE:
      return config_error(
        fmt::format("no more open files ({}): see ulimit -n", x.what()));
    default:
      return std::nullopt;
  }
}

} // namespace smp
