#pragma once

// Hidden test cases of this program as the ranks of a run.

#include "tests/support/catch.hpp"

#include "runtime/launch/launcher.hpp"
#include "tests/support/runs/program.hpp"
#include "tests/support/scratch_dir.hpp"

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <utility>

namespace smp::test {

/// Each rank runs the case `name`, finds the folder in TEST_DIR, and writes its
/// log there.
/// @returns the exit code
inline int launch_case(const scratch_dir& dir, const std::string& name,
                       uint64_t ranks,
                       std::map<std::string, std::string> environment = {}) {
  environment["TEST_DIR"] = dir.path;
  launch_options x;
  x.command = this_program(name);
  x.ranks = ranks;
  x.log_dir = dir.path;
  x.environment = std::move(environment);
  return launch(x);
}

/// What the ranks wrote, one after the other.
inline std::string logs_of(const scratch_dir& dir) {
  std::string result;
  for (uint64_t i = 0;; ++i) {
    auto name = "log-" + std::to_string(i) + ".txt";
    if (!std::filesystem::exists(dir.path / name))
      return result;
    result += dir.read(name);
  }
}

/// The same, and all ranks have to succeed.
inline void require_case(const scratch_dir& dir, const std::string& name,
                         uint64_t ranks,
                         std::map<std::string, std::string> environment = {}) {
  auto code = launch_case(dir, name, ranks, std::move(environment));
  INFO(logs_of(dir));
  REQUIRE(code == 0);
}

} // namespace smp::test
