#pragma once

#include "tests/support/catch.hpp"
#include "tests/support/runs/program.hpp"

#include <filesystem>
#include <fstream>
#include <string>

#include <stdlib.h>

namespace smp::test {

/// A directory for one test, removed at its end.
class scratch_dir {
public:
  scratch_dir() {
    std::string name = std::filesystem::temp_directory_path() / "smp-XXXXXX";
    REQUIRE(::mkdtemp(name.data()) != nullptr);
    path = name;
  }

  ~scratch_dir() {
    std::error_code ignored;
    std::filesystem::remove_all(path, ignored);
  }

  scratch_dir(const scratch_dir&) = delete;
  scratch_dir& operator=(const scratch_dir&) = delete;

  /// @returns the path of a new file with this text
  std::string write(const std::string& name, const std::string& text) const {
    auto file = path / name;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream{file} << text;
    return file.string();
  }

  std::string read(const std::string& name) const {
    return content_of(path / name);
  }

  std::filesystem::path path;
};

} // namespace smp::test
