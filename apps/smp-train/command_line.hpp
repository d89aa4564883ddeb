#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace smp::app {

enum class log_level : uint8_t { error, warn, info, debug };

/// What the user typed.
struct command_line {
  bool check = false;
  std::string config;
  /// "--table.key=value", with what `--ranks` means among them.
  std::vector<std::string> overrides;
  /// Empty: a new directory below runs/.
  std::string run_dir;
  log_level level = log_level::info;
};

/// @returns nothing if all was said already (`--help`, a wrong command line);
///          `exit_code` then is the program's
std::optional<command_line> parse_command_line(int argc, char** argv,
                                               int& exit_code);

} // namespace smp::app
