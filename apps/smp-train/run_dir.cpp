#include "apps/smp-train/run_dir.hpp"

#include "transport/error.hpp"

#include <fmt/chrono.h>

#include <ctime>
#include <filesystem>

namespace fs = std::filesystem;

namespace smp::app {

namespace {

[[noreturn]] void fail(const fs::path& path, const std::error_code& why) {
  throw error{error_code::config,
              fmt::format("cannot make the run directory {}: {}", path.string(),
                          why.message())};
}

/// @returns false if it is there already
bool make(const fs::path& path) {
  std::error_code why;
  auto made = fs::create_directories(path, why);
  if (why)
    fail(path, why);
  return made;
}

} // namespace

std::string make_run_dir(const std::string& wanted,
                         const std::string& config_path) {
  if (!wanted.empty()) {
    make(wanted);
    return wanted;
  }
  std::tm now{};
  auto seconds = std::time(nullptr);
  ::localtime_r(&seconds, &now);
  const auto base = fmt::format("runs/{:%Y%m%d-%H%M%S}-{}", now,
                                fs::path{config_path}.stem().string());
  auto result = base;
  for (int i = 2; !make(result); ++i)
    result = fmt::format("{}-{}", base, i);
  return result;
}

} // namespace smp::app
