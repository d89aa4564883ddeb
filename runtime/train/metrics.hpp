#pragma once

#include "runtime/launch/restart_policy.hpp"
#include "runtime/train/rank_devices.hpp"

#include <cstdint>
#include <fstream>
#include <optional>
#include <string>
#include <vector>

namespace smp {

/// One training step as a line of RUN_DIR/metrics.jsonl.
struct step_metrics {
  uint64_t step = 0; // from 1
  double loss = 0;
  double lr = 0;
  /// 2-norm of the whole gradient before clipping.
  double grad_norm = 0;
  /// Wall time of the step, optimizer included.
  double step_seconds = 0;
  double samples_per_second = 0;
  /// Share of the ranks' time in the pipeline in which they had nothing to
  /// execute: 1 - sum of executing times / (ranks x time of the step function).
  double bubble_ratio = 0;
  uint64_t requests = 0;   // sum over ranks
  uint64_t bytes_sent = 0; // sum over ranks
  /// Of all ranks, see `step_stats`; nothing unless activations are offloaded.
  std::optional<uint64_t> offloaded_bytes = {};
  double offload_wait_seconds = 0;
  /// By rank, after the update; empty on the host.
  std::vector<device_status> devices = {};
  /// "record", "replay" or "fallback" (docs/modes.md); empty where no
  /// step is replayed.
  std::string static_mode = {};
  /// Why the step was taken back and run again (docs/modes.md); empty if it
  /// was not.
  std::string ran_again = {};
  /// Factor by which backward multiplied the loss; 1: unscaled.
  double loss_scale = 1;
  /// Why the step updated nothing; empty if it was not skipped.
  std::string skipped = {};
  /// Seconds by which a checkpoint after the previous step delayed this one; 0
  /// if there was none.
  double checkpoint_seconds = 0;
  /// Mean loss of the held-out batches after the step; NaN until it is known,
  /// nothing if no evaluation follows the step.
  std::optional<double> held_out_loss = {};
};

/// @returns one JSON object without a line break; a number that is not finite
/// becomes null, as JSON cannot express it.
std::string to_json(const step_metrics& x);

// -- a run that is started again ----------------------------------------------

/// Puts a line at the end of RUN_DIR/metrics.jsonl, which is made if necessary:
/// the lines that follow begin again with the step after `x.from_step`. A line
/// that the end of a rank broke is removed.
/// @throws error (config) naming `path`
void add_restart(const std::string& path, const restart_note& x);

/// @returns the steps that are done as of the last line; nothing without one
/// @throws error (config) naming `path`
std::optional<uint64_t> steps_done_in(const std::string& path);

// -- writing ------------------------------------------------------------------

/// Appends steps to a file. Each line is complete and flushed, so that a run
/// can be followed and a killed run breaks at most the last line.
class metrics_file {
public:
  /// Creates `path` or empties it.
  /// @param goes_on the last line is that of a restart, and stays
  /// @throws error (config) naming `path`
  explicit metrics_file(std::string path, bool goes_on = false);

  /// @throws error (config) naming the file, e.g. if the disk is full
  void write(const step_metrics& x);

  /// Writes the loss into the last step's line, in place of its null; does
  /// nothing if that line has none. After a restart that is the line of the
  /// step from which the run goes on. No line moves or grows, so a reader that
  /// follows the file sees each line once, and a killed run keeps all lines.
  /// @throws error (config) as `write`
  void add_held_out_loss(double x);

private:
  void put(const std::string& line);
  void find_open_line();

  std::string path_;
  std::ofstream out_;
  /// The last step's line, if it has a place for a held-out loss, and where it
  /// begins.
  std::string open_line_;
  std::ofstream::pos_type begin_;
};

} // namespace smp
