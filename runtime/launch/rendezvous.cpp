#include "runtime/launch/rendezvous.hpp"

#include "runtime/base/file_io.hpp"
#include "runtime/launch/secret_handover.hpp"
#include "transport/error.hpp"

#include <fmt/format.h>

#include <cerrno>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <optional>
#include <sstream>
#include <thread>

#include <fcntl.h>
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

/// Stands in the file where there is no secret.
constexpr const char* no_secret = "-";

/// @returns the content if the file is there, whole, and its writer lives
std::optional<meeting_point> read_point(const std::string& path) {
  std::istringstream file{read_private_file(path).value_or("")};
  meeting_point result;
  int64_t pid = 0;
  uint64_t started = 0;
  std::string host;
  std::string secret;
  if (!(file >> result.port >> pid >> started >> host >> secret)
      || result.port == 0)
    return std::nullopt;
  if (host == host_name() && start_time(pid) != started)
    return std::nullopt;
  result.secret = run_secret::from_hex(secret);
  if (!result.secret && secret != no_secret)
    return std::nullopt;
  return result;
}

/// Nobody else can read the file at any time.
bool write_private_file(const std::string& path, const std::string& text) {
  ::unlink(path.c_str());
  file_descriptor file{::open(
    path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600)};
  return file
         && ::write(file.get(), text.data(), text.size())
              == static_cast<ssize_t>(text.size());
}

} // namespace

published_point::published_point(const rank_environment& x,
                                 const meeting_point& point)
  : path_(path_of(x)) {
  auto draft = fmt::format("{}.{}", path_, ::getpid());
  auto pid = static_cast<int64_t>(::getpid());
  auto text = fmt::format("{} {} {} {} {}\n", point.port, pid, start_time(pid),
                          host_name(),
                          point.secret ? point.secret->to_hex() : no_secret);
  if (!write_private_file(draft, text)
      || ::rename(draft.c_str(), path_.c_str()) != 0) {
    auto why = std::strerror(errno);
    ::unlink(draft.c_str());
    throw error{error_code::config,
                fmt::format("{}: cannot be written ({}); set "
                            "SMP_RENDEZVOUS_DIR to a directory that all ranks "
                            "can write to",
                            path_, why)};
  }
}

published_point::~published_point() {
  ::unlink(path_.c_str());
}

meeting_point await_point(const rank_environment& x,
                          std::chrono::milliseconds limit) {
  auto path = path_of(x);
  auto deadline = std::chrono::steady_clock::now() + limit;
  for (;;) {
    if (auto point = read_point(path))
      return *point;
    if (std::chrono::steady_clock::now() >= deadline)
      throw error{failure{
        error_code::rank_down,
        rank_id{0},
        {},
        fmt::format("did not tell within {} ms where to join; looked for {} "
                    "(ranks without a common directory want MASTER_PORT and "
                    "{})",
                    limit.count(), path, secret_file_variable)}};
    std::this_thread::sleep_for(std::chrono::milliseconds{5});
  }
}

} // namespace smp
