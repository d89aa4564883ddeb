#pragma once

// What somebody does who has the installed smp and projects of their own.

#include "tests/support/catch.hpp"
#include "tests/support/runs/program.hpp"

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

namespace smp::test {

class installed_smp {
public:
  /// Installs this build into `dir`/prefix.
  explicit installed_smp(std::filesystem::path dir) : dir_(std::move(dir)) {
    auto build = std::filesystem::path{std::getenv("SMP_BIN_DIR")}
                   .parent_path();
    run({"cmake", "--install", build.string(), "--prefix", prefix()});
  }

  std::string prefix() const {
    return (dir_ / "prefix").string();
  }

  /// Configures and builds the project in `dir`/name, in its folder build.
  void build(const std::string& name,
             const std::string& build_type = {}) const {
    run({"cmake", "-S", name, "-B", name + "/build", "-G", "Ninja",
         "-DCMAKE_BUILD_TYPE=" + build_type,
         "-DCMAKE_PREFIX_PATH=" + prefix()});
    run({"cmake", "--build", name + "/build"});
  }

  /// Runs a command in `dir` and requires that it ends well.
  /// @returns what it printed
  std::string run(std::vector<std::string> command) const {
    program p{std::move(command), dir_};
    auto code = p.join(std::chrono::minutes{8});
    INFO(p.output());
    REQUIRE(code == 0);
    return p.output();
  }

private:
  std::filesystem::path dir_;
};

} // namespace smp::test
