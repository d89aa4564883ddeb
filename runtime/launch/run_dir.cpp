#include "runtime/launch/run_dir.hpp"

#include "runtime/files/file_io.hpp"
#include "transport/error.hpp"

#include <fmt/chrono.h>

#include <cinttypes>
#include <cstdio>
#include <ctime>
#include <filesystem>
#include <system_error>

namespace smp {

namespace {

/// @returns false if it already exists
bool make_directories(const std::filesystem::path& path) {
  std::error_code why;
  auto made = std::filesystem::create_directories(path, why);
  if (why)
    throw config_error(fmt::format("cannot make the run directory {}: {}",
                                   path.string(), why.message()));
  return made;
}

/// @returns whether this is the name of a file of a rank: "log-12.txt",
/// "flight-12"
bool is_of_rank(const std::string& name) {
  for (auto* form : {"log-%" SCNu64 ".txt%n", "flight-%" SCNu64 "%n"}) {
    uint64_t rank = 0;
    int end = 0;
    if (std::sscanf(name.c_str(), form, &rank, &end) == 1
        && static_cast<size_t>(end) == name.size())
      return true;
  }
  return false;
}

} // namespace

void claim_run_dir(const std::string& path,
                   const std::vector<std::string>& signs) {
  for (auto& name : signs) {
    const auto sign = (std::filesystem::path{path} / name).string();
    std::error_code missing;
    auto size = std::filesystem::file_size(sign, missing);
    if (!missing && size > 0)
      throw config_error(
        fmt::format("--run-dir {} holds a run already ({}); give another "
                    "directory or remove this one, or leave --run-dir out for "
                    "a new one below runs/",
                    path, sign));
  }
  remove_leftovers(path);
}

void remove_launcher_files(const std::string& path) {
  std::error_code ignored;
  for (auto& x : std::filesystem::directory_iterator{path, ignored})
    if (auto name = x.path().filename().string();
        name == "end.json" || name == "stall.json" || is_of_rank(name))
      std::filesystem::remove(x.path(), ignored);
}

std::string make_run_dir(const std::string& wanted, const std::string& name) {
  if (!wanted.empty()) {
    make_directories(wanted);
    return wanted;
  }
  std::tm now{};
  auto seconds = std::time(nullptr);
  ::localtime_r(&seconds, &now);
  const auto base = fmt::format("runs/{:%Y%m%d-%H%M%S}-{}", now, name);
  auto result = base;
  for (int i = 2; !make_directories(result); ++i)
    result = fmt::format("{}-{}", base, i);
  return result;
}

} // namespace smp
