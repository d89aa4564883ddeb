#include "runtime/launch/run_outcome.hpp"

#include "runtime/base/json_text.hpp"
#include "runtime/files/file_io.hpp"
#include "transport/error.hpp"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>

#include <sys/mman.h>
#include <unistd.h>

namespace smp {

const char* to_string(run_stage x) noexcept {
  switch (x) {
    case run_stage::start:
      return "start";
    case run_stage::session:
      return "session";
    case run_stage::step:
      return "step";
  }
  return "unknown";
}

run_stage rank_progress::stage() const noexcept {
  return done > 0       ? run_stage::step
         : sessions > 0 ? run_stage::session
                        : run_stage::start;
}

file_descriptor progress_descriptor() {
  file_descriptor result{::memfd_create("smp-progress", MFD_CLOEXEC)};
  if (!result)
    throw config_error(
      fmt::format("no memory file in which ranks tell how far they came: {}",
                  std::strerror(errno)));
  return result;
}

progress_report::progress_report() {
  auto* fd = std::getenv(progress_descriptor_variable);
  auto* slot = std::getenv("SMP_LOCAL_RANK");
  if (fd == nullptr || slot == nullptr)
    return;
  fd_ = std::atoi(fd);
  slot_ = static_cast<uint64_t>(std::atoll(slot));
  now_ = told_progress(fd_, slot_);
}

void progress_report::session_begins() {
  ++now_.sessions;
  tell();
}

void progress_report::operator()(bool begins) {
  now_.in_step = begins ? 1 : 0;
  ++(begins ? now_.steps : now_.done);
  tell();
}

void progress_report::tell() const {
  if (fd_ < 0)
    return;
  auto at = static_cast<off_t>(slot_ * sizeof(now_));
  auto ignored = ::pwrite(fd_, &now_, sizeof(now_), at);
  static_cast<void>(ignored);
}

rank_progress told_progress(int fd, uint64_t local_rank) {
  rank_progress result;
  auto at = static_cast<off_t>(local_rank * sizeof(result));
  if (::pread(fd, &result, sizeof(result), at) != sizeof(result))
    return {};
  return result;
}

std::string end_path(const std::string& run_dir) {
  return run_dir + "/end.json";
}

void write_run_outcome(const std::string& run_dir, const run_outcome& x) {
  nlohmann::json end{{"exit_code", x.exit_code},
                     {"cause", x.cause},
                     {"reached", to_string(x.reached)},
                     {"restarts", x.restarts}};
  std::ofstream{end_path(run_dir)} << json_text(end, 2) << '\n';
}

std::string stall_path(const std::string& run_dir) {
  return run_dir + "/stall.json";
}

void write_stall(const std::string& run_dir, const stall_report& x) {
  nlohmann::json silent = nlohmann::json::array();
  for (auto rank : x.silent)
    silent.push_back(rank.value);
  nlohmann::json result{{"deadlock", x.deadlock},
                        {"ends", x.ends},
                        {"text", x.text},
                        {"waits", x.all},
                        {"silent", std::move(silent)}};
  if (x.culprit != no_rank)
    result["culprit"] = x.culprit.value;
  std::ofstream{stall_path(run_dir)} << json_text(result, 2) << '\n';
}

std::optional<run_outcome> read_run_outcome(const std::string& run_dir) {
  auto text = try_read(end_path(run_dir));
  if (!text)
    return std::nullopt;
  try {
    auto read = nlohmann::json::parse(*text);
    run_outcome result;
    result.exit_code = read.at("exit_code").get<int>();
    result.cause = read.at("cause").get<std::string>();
    result.restarts = read.value("restarts", uint64_t{0});
    auto reached = read.at("reached").get<std::string>();
    while (to_string(result.reached) != reached) {
      if (result.reached == last_of(result.reached))
        return std::nullopt;
      result.reached = static_cast<run_stage>(
        static_cast<uint8_t>(result.reached) + 1);
    }
    return result;
  } catch (const nlohmann::json::exception&) {
    return std::nullopt;
  }
}

} // namespace smp
