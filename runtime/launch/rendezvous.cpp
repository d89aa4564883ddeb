#include "runtime/launch/rendezvous.hpp"

#include "runtime/launch/network_choice.hpp"
#include "runtime/launch/secret_handover.hpp"
#include "transport/error.hpp"
#include "transport/files/private_file.hpp"
#include "transport/network/addresses.hpp"
#include "transport/process_state.hpp"

#include <fmt/format.h>

#include <csignal>
#include <cstring>
#include <filesystem>
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

/// 0 if there is no such process.
uint64_t start_time(int64_t pid) {
  auto x = state_of_process(pid);
  return x ? x->start_time : 0;
}

/// Written to the file if there is no secret.
constexpr const char* no_secret = "-";

/// @returns the content if the file is complete and its writer lives
std::optional<meeting_point> read_point(const std::string& path) {
  std::istringstream file{read_private_file(path).value_or("")};
  meeting_point result;
  int64_t pid = 0;
  uint64_t started = 0;
  std::string host;
  std::string secret;
  if (!(file >> result.port >> pid >> started >> host >> secret
        >> result.address)
      || result.port == 0)
    return std::nullopt;
  if (host != host_name() && is_loopback(result.address))
    throw config_error(fmt::format(
      "rank 0 is on machine {} and listens to that machine only; set "
      "MASTER_ADDR and MASTER_PORT, or transport.interface, for a run over "
      "several machines (docs/machines.md)",
      host));
  if (host == host_name() && start_time(pid) != started)
    return std::nullopt;
  result.secret = run_secret::from_hex(secret);
  if (!result.secret && secret != no_secret)
    return std::nullopt;
  return result;
}

} // namespace

published_point::published_point(const rank_environment& x,
                                 const meeting_point& point)
  : path_(path_of(x)) {
  auto pid = static_cast<int64_t>(::getpid());
  auto text = fmt::format(
    "{} {} {} {} {} {}\n", point.port, pid, start_time(pid), host_name(),
    point.secret ? point.secret->to_hex() : no_secret, point.address);
  if (auto problem = write_private_file(path_, text))
    throw error{error_code::config,
                fmt::format("{}: cannot be written ({}); set "
                            "SMP_RENDEZVOUS_DIR to a directory that all ranks "
                            "can write to",
                            path_, std::strerror(problem))};
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
                    "(ranks without a common directory need MASTER_PORT and "
                    "{}; those of several machines MASTER_ADDR, MASTER_PORT "
                    "and transport.keys: docs/machines.md)",
                    limit.count(), path, secret_file_variable)}};
    std::this_thread::sleep_for(std::chrono::milliseconds{5});
  }
}

} // namespace smp
