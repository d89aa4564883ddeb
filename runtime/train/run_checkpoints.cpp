#include "runtime/train/run_checkpoints.hpp"

#include "runtime/checkpoint/checkpoint_lock.hpp"
#include "runtime/collectives/agreement.hpp"
#include "runtime/session/rank_runtime.hpp"
#include "runtime/train/resume_plan.hpp"

namespace smp {

run_checkpoints::run_checkpoints(const train_config& config,
                                 const data_source& data,
                                 const distributed_model_base& model,
                                 distributed_optimizer& optimizer)
  : config_(config), data_(data), model_(model), optimizers_{&optimizer} {
  auto folder = agree_everywhere(
    session::current().internals(), "smp.train.resume", [&] {
      if (!config.checkpoint.dir.empty())
        lock_checkpoints(config.checkpoint.dir, model.state());
      auto plan = plan_resume(config, data);
      if (plan)
        changes_ = plan->changes;
      return plan ? plan->folder : std::string{};
    });
  if (folder.empty())
    return;
  found_ = checkpoint_loader::find(folder);
  found_->check(model_, optimizers_);
  found_->adopt_partition(model_);
}

void run_checkpoints::rehearse(const std::function<void(uint64_t)>& step) {
  if (found_)
    found_->rehearse(optimizers_, step);
  load();
}

void run_checkpoints::load() {
  // Optimizer options come from the configuration, not from the checkpoint.
  if (found_)
    found_->load(model_, optimizers_);
}

bool run_checkpoints::due(uint64_t step, bool interrupted) const {
  auto& x = config_.checkpoint;
  if (x.dir.empty())
    return false;
  return wanted_ || step % x.interval == 0 || step == config_.train.steps
         || (interrupted && x.on_interrupt);
}

saved_checkpoint run_checkpoints::save(uint64_t step) {
  return save_checkpoint(
    config_.checkpoint.dir, step, model_, optimizers_,
    {.num_kept_partial_checkpoints = config_.checkpoint.keep,
     .settings = checkpoint_settings(config_, data_)});
}

} // namespace smp
