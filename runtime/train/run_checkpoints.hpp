#pragma once

#include "runtime/checkpoint/checkpoint.hpp"
#include "runtime/checkpoint/checkpoint_loader.hpp"
#include "runtime/checkpoint/pending_checkpoint.hpp"
#include "runtime/config/config_file.hpp"

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace smp {

class data_source;

/// The checkpoints of one run of smp-train: where it resumes and when it saves.
/// Functions that communicate are collective over the world.
class run_checkpoints {
public:
  /// Hears of a checkpoint that is on disk, and after which step it was saved.
  using listener = std::function<void(uint64_t, const saved_checkpoint&)>;

  /// Finds and checks the checkpoint that the run resumes from, if any.
  /// @throws error (config) as `plan_resume` and `checkpoint_loader::check` do
  run_checkpoints(const train_config& config, const data_source& data,
                  const distributed_model_base& model,
                  distributed_optimizer& optimizer, listener on_saved);

  /// The checkpoint that the run resumes from; empty if it begins anew.
  std::string resumed_from() const {
    return found_ ? found_->folder() : std::string{};
  }

  /// Steps done before this run.
  uint64_t steps_done() const {
    return found_ ? found_->manifest().step : 0;
  }

  /// See `resume_plan`; on rank 0.
  const std::vector<std::string>& changes() const noexcept {
    return changes_;
  }

  /// Runs the first steps once more (`checkpoint_loader::rehearse`) and loads
  /// the checkpoint.
  void rehearse(const std::function<void(uint64_t)>& step);

  /// Loads the checkpoint, if one was found. @pre partitioned
  void load();

  /// Begins to save if a checkpoint is due after this step, unless it was begun
  /// already: it is written while training goes on.
  /// @param interrupted the run ends after this step
  void save_if_due(uint64_t step, bool interrupted);

  /// @param x whether somebody wants one after this step, due or not
  void want(bool x) {
    wanted_ = x;
  }

  /// Whether there is nothing left to wait for, as rank 0 sees it; false on
  /// other ranks.
  bool written() const;

  /// Waits for the checkpoint that is being written, if any.
  /// @throws error (config) as `save_checkpoint` does, on all ranks
  void await();

  /// Seconds for which the run stood still since the last call.
  double take_seconds() noexcept {
    return std::exchange(seconds_, 0);
  }

private:
  bool due(uint64_t step, bool interrupted) const;

  const train_config& config_;
  const data_source& data_;
  const distributed_model_base& model_;
  std::vector<distributed_optimizer*> optimizers_;
  std::shared_ptr<checkpoint_loader> found_;
  std::vector<std::string> changes_;
  listener on_saved_;
  bool wanted_ = false;
  uint64_t begun_ = 0; // the step of the last one
  double seconds_ = 0;
  std::unique_ptr<pending_checkpoint> pending_; // ends before the model
};

} // namespace smp
