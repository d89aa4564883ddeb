#pragma once

#include <chrono>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include <sys/types.h>

namespace smp::test {

/// Another program, run as a user runs it, with what it writes. Never outlives
/// its owner.
class program {
public:
  /// @param command [0] is looked up in PATH if it has no slash
  /// @param directory where it runs
  /// @param environment what is set in addition
  explicit program(std::vector<std::string> command,
                   std::filesystem::path directory = ".",
                   std::map<std::string, std::string> environment = {});

  ~program();

  program(const program&) = delete;
  program& operator=(const program&) = delete;

  /// @returns whether `text` stood in the output within the limit, before the
  /// program ended.
  bool wait_for(const std::string& text,
                std::chrono::milliseconds limit = std::chrono::seconds{60});

  void signal(int number);

  pid_t pid() const noexcept {
    return pid_;
  }

  /// Waits for the end, kills the program after the limit.
  /// @returns the exit code, or minus the signal
  int join(std::chrono::milliseconds limit = std::chrono::seconds{100});

  /// Waits for the end; fails the test unless the exit code is this one.
  /// @returns what it wrote
  std::string finish(int expected = 0);

  /// What it wrote until now, stdout and stderr together.
  const std::string& output() const noexcept {
    return output_;
  }

private:
  /// @returns false at the end of the output or after the deadline
  bool read_some(std::chrono::steady_clock::time_point deadline);

  pid_t pid_ = -1;
  int output_fd_ = -1;
  std::string output_;
};

/// @returns the command of this program with a hidden test case, or those of a
/// tag
std::vector<std::string> this_program(const std::string& test);

/// @returns a program that was built with the tests, by its file name.
std::string built_program(const std::string& name);

/// @returns a file of the source tree, by its path from the root.
std::string source_file(const std::string& path);

/// @returns the content of a file; fails the test if it cannot be read.
std::string content_of(const std::filesystem::path& path);

} // namespace smp::test
