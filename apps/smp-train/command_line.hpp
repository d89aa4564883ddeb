#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace smp::app {

enum class log_level : uint8_t { error, warn, info, debug };

enum class command : uint8_t {
  train,
  check,
  partition,
  schedule,
  verify,
  keys
};

/// Options of the command `partition`.
struct partition_command {
  /// A tree given as data, instead of a configuration.
  std::string tree;
  uint32_t devices = 0; // 0: not given
  std::optional<double> memory_weight;
  std::optional<std::string> strategy;
  /// Where the decision goes; empty: it is only printed.
  std::string json;
};

/// Options of the command `schedule`: files, empty if not given.
struct schedule_command {
  std::string svg;
  std::string json;
};

/// Options of the command `verify`.
struct verify_command {
  std::optional<uint64_t> steps;
  /// Modules go to the ranks in turn.
  bool split = false;
  /// Names of `run_mode`, one after the other; empty: as configured.
  std::vector<std::string> modes;
  /// Where the result goes; empty: it is only printed.
  std::string json;
};

/// Several machines.
struct nodes_command {
  /// With a launcher on each machine: how many, which one this is, and the
  /// address of the first one. 0 nodes: one machine.
  uint64_t nodes = 0;
  std::optional<uint64_t> node;
  std::string master; // "HOST:PORT"
  /// Ranks of each machine, or one number for all; empty: an equal share.
  std::vector<uint64_t> ranks;
  /// "a:2", "b": start those launchers by ssh.
  std::vector<std::string> hosts;
};

/// What the user typed.
struct command_line {
  command what = command::train;
  std::vector<std::string> words; // all of it
  std::string config;
  /// "--table.key=value", including the key that `--ranks` sets.
  std::vector<std::string> overrides;
  /// Empty: a new directory below runs/.
  std::string run_dir;
  log_level level = log_level::info;
  partition_command partition;
  schedule_command schedule;
  verify_command verify;
  nodes_command nodes;
  /// New folder for the keys that the command `keys` makes.
  std::string keys;
};

/// @returns nothing if there is nothing left to do (`--help`, a wrong command
///          line); `exit_code` then is the program's
std::optional<command_line> parse_command_line(int argc, char** argv,
                                               int& exit_code);

} // namespace smp::app
