#pragma once

#include "apps/smp-train/command_line.hpp"
#include "runtime/config/config_file.hpp"
#include "runtime/launch/restart_policy.hpp"

#include <cstdint>
#include <string>
#include <vector>

namespace smp::app {

/// A run of smp-train that its launcher may start again: how far it came, and
/// where it goes on. Used while no rank runs; the first machine decides.
class run_restarts {
public:
  /// @param command of each rank, the program's name first
  /// @throws error (config) if checkpoints cannot be looked for, or if the run
  ///         is to be elastic and cannot be
  run_restarts(const command_line& line, const train_config& config,
               std::string run_dir, std::vector<std::string> command);

  /// @throws error (config) naming the file or folder that cannot be read
  run_position look() const;

  /// Puts a restart on record in RUN_DIR/metrics.jsonl.
  /// @throws error (config) naming the file
  void record(const restart_note& x);

  /// @param newest of `checkpoint.dir`: the first start may have begun
  ///        elsewhere
  /// @param ranks of the whole run. With fewer than at first, each replica
  ///        makes more microbatches, and a step has the samples it had
  /// @returns the command of each rank of this machine
  std::vector<std::string> command(bool newest, uint64_t ranks) const;

  /// See `rank_limit`: whole replicas, which divide the microbatches of all,
  /// with a configuration that has no errors.
  uint64_t fit(uint64_t ranks) const;

private:
  struct origin {
    uint64_t step = 0;
    std::string checkpoint;
    bool newest = false; // of `checkpoint.dir`
  };

  /// @returns where a rank that starts now goes on
  origin next_origin() const;

  /// @returns what differs with so many ranks, "--key=value"
  std::vector<std::string> settings_with(uint64_t ranks) const;

  /// @param why set to the first error, if the result is 0
  uint64_t fit(uint64_t ranks, std::string& why) const;

  const command_line& line_;
  const train_config& config_;
  std::string metrics_;
  std::vector<std::string> command_;
  uint64_t began_at_ = 0; // steps that the last ranks did not have to make
};

} // namespace smp::app
