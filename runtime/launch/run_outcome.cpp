#include "runtime/launch/run_outcome.hpp"

#include "runtime/base/file_io.hpp"
#include "runtime/base/json_text.hpp"
#include "transport/error.hpp"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>

#include <sys/eventfd.h>

namespace smp {

namespace {

/// The count of a step. Sessions, maybe several per rank, add up below it.
constexpr eventfd_t one_step = eventfd_t{1} << 32;

} // namespace

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

file_descriptor stage_descriptor() {
  file_descriptor result{::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
  if (!result)
    throw config_error(
      fmt::format("no descriptor by which rank 0 tells how "
                  "far it came: {}",
                  std::strerror(errno)));
  return result;
}

void tell_stage(run_stage x) {
  auto* fd = std::getenv(stage_descriptor_variable);
  if (fd != nullptr && x != run_stage::start)
    ::eventfd_write(std::atoi(fd), x == run_stage::step ? one_step : 1);
}

run_stage told_stage(int fd) {
  eventfd_t told = 0;
  if (::eventfd_read(fd, &told) != 0)
    return run_stage::start;
  return told >= one_step ? run_stage::step : run_stage::session;
}

std::string end_path(const std::string& run_dir) {
  return run_dir + "/end.json";
}

void write_run_outcome(const std::string& run_dir, const run_outcome& x) {
  nlohmann::json end{{"exit_code", x.exit_code},
                     {"cause", x.cause},
                     {"reached", to_string(x.reached)}};
  std::ofstream{end_path(run_dir)} << json_text(end, 2) << '\n';
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
