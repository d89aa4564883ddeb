#pragma once

#include "runtime/checkpoint/checkpoint.hpp"
#include "runtime/checkpoint/checkpoint_loader.hpp"
#include "runtime/config/config_file.hpp"

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace smp {

class data_source;

/// The checkpoints of one run of smp-train: where it resumes and when it saves.
/// Functions that communicate are collective over the world.
class run_checkpoints {
public:
  /// Finds and checks the checkpoint that the run resumes from, if any.
  /// @throws error (config) as `plan_resume` and `checkpoint_loader::check` do
  run_checkpoints(const train_config& config, const data_source& data,
                  const distributed_model_base& model,
                  distributed_optimizer& optimizer);

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

  /// Tells whether a checkpoint is to be saved after this step.
  /// @param interrupted the run ends after this step
  bool due(uint64_t step, bool interrupted) const;

  /// @param x whether somebody wants one after this step, due or not
  void want(bool x) {
    wanted_ = x;
  }

  saved_checkpoint save(uint64_t step);

private:
  const train_config& config_;
  const data_source& data_;
  const distributed_model_base& model_;
  std::vector<distributed_optimizer*> optimizers_;
  std::shared_ptr<checkpoint_loader> found_;
  std::vector<std::string> changes_;
  bool wanted_ = false;
};

} // namespace smp
