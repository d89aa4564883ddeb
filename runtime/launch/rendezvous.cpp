#include "runtime/launch/rendezvous.hpp"

#include "runtime/base/file_io.hpp"
#include "transport/error.hpp"

#include <fmt/format.h>

#include <cerrno>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <optional>
#include <sstream>
#include <thread>

#include <unistd.h>

namespace smp {

namespace {

/// The run id comes from a launcher: it must not lead out of the directory.
std::string path_of(const rank_environment& x) {
  std::string name;
  for (char c : x.run_id) {
    bool plain = (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z')
                 || (c >= 'A' && c <= 'Z') || c == '-' || c == '_';
    name += plain ? c : '_';
  }
  return fmt::format("{}/smp-{}.port", x.rendezvous_dir, name);
}

std::string host_name() {
  char name[256] = {};
  ::gethostname(name, sizeof(name) - 1);
  return name;
}

/// When process `pid` started, in clock ticks since boot: tells it from a
/// later one with its number. 0 if there is none.
uint64_t start_time(int64_t pid) {
  auto text = try_read(fmt::format("/proc/{}/stat", pid)).value_or("");
  auto name_end = text.rfind(')'); // the name may contain blanks
  if (name_end == std::string::npos)
    return 0;
  std::istringstream rest{text.substr(name_end + 1)};
  std::string field;
  for (int i = 3; i <= 22; ++i) // starttime is field 22, see proc(5)
    rest >> field;
  return std::strtoull(field.c_str(), nullptr, 10);
}

/// @returns the port if the file is there and its writer lives
std::optional<uint16_t> read_port(const std::string& path) {
  std::ifstream file{path};
  uint16_t port = 0;
  int64_t pid = 0;
  uint64_t started = 0;
  std::string host;
  if (!(file >> port >> pid >> started >> host) || port == 0)
    return std::nullopt;
  if (host == host_name() && start_time(pid) != started)
    return std::nullopt;
  return port;
}

} // namespace

published_port::published_port(const rank_environment& x, uint16_t port)
  : path_(path_of(x)) {
  auto draft = fmt::format("{}.{}", path_, ::getpid());
  auto pid = static_cast<int64_t>(::getpid());
  std::ofstream file{draft};
  file << fmt::format("{} {} {} {}\n", port, pid, start_time(pid), host_name());
  file.close();
  if (!file || ::rename(draft.c_str(), path_.c_str()) != 0) {
    auto why = std::strerror(errno);
    ::unlink(draft.c_str());
    throw error{error_code::config,
                fmt::format("{}: cannot be written ({}); set "
                            "SMP_RENDEZVOUS_DIR to a directory that all ranks "
                            "can write to",
                            path_, why)};
  }
}

published_port::~published_port() {
  ::unlink(path_.c_str());
}

uint16_t await_port(const rank_environment& x,
                    std::chrono::milliseconds limit) {
  auto path = path_of(x);
  auto deadline = std::chrono::steady_clock::now() + limit;
  for (;;) {
    if (auto port = read_port(path))
      return *port;
    if (std::chrono::steady_clock::now() >= deadline)
      throw error{failure{
        error_code::rank_down,
        rank_id{0},
        {},
        fmt::format("did not tell within {} ms where to join; looked for {}",
                    limit.count(), path)}};
    std::this_thread::sleep_for(std::chrono::milliseconds{5});
  }
}

} // namespace smp
