#pragma once

#include "apps/smp-train/command_line.hpp"
#include "runtime/config/config_file.hpp"
#include "runtime/train/trainer.hpp"

#include <string>
#include <utility>

namespace smp::app {

/// The command `partition --tree`: prints the decision for a tree given as
/// data, and writes it.
/// @throws error (config) naming what is wrong with the files
void partition_tree_file(const partition_command& x, bool terminal);

/// The command `partition CONFIG`: the same for the model of a configuration.
/// @throws error (config) naming what is wrong with model, data or placement
void partition_config(const partition_command& x, const train_config& config,
                      bool terminal);

/// Writes RUN_DIR/partition.json of a run, the same as `partition --json`.
class partition_file final : public train_listener {
public:
  explicit partition_file(std::string run_dir) : run_dir_(std::move(run_dir)) {
    // nop
  }

  void on_start(const train_start&) override {
    // nop
  }

  void on_decision(const partition_decision& x, session& s, model_state& state,
                   trainable& whole) override;

  void on_step(const step_metrics&) override {
    // nop
  }

  void on_evaluation(uint64_t, double) override {
    // nop
  }

private:
  std::string run_dir_;
};

} // namespace smp::app
