#include "apps/smp-train/run_dir.hpp"

#include "runtime/base/file_io.hpp"
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

void claim_run_dir(const std::string& path) {
  const auto steps = (fs::path{path} / "metrics.jsonl").string();
  std::error_code ignored;
  if (auto size = fs::file_size(steps, ignored); ignored || size == 0)
    return remove_leftovers(path);
  throw error{error_code::config,
              fmt::format("--run-dir {} holds a run already ({}); give another "
                          "directory or remove this one, or leave --run-dir "
                          "out for a new one below runs/",
                          path, steps)};
}

void write_run_config(const std::string& run_dir, const train_config& x) {
  write_text(run_dir + "/config.toml",
             "# The configuration of this run, with all defaults; smp-train "
             "with this file\n# runs the same again.\n\n"
               + to_toml(x));
}

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
