#include "runtime/train/run_checkpoints.hpp"

#include "runtime/checkpoint/checkpoint_lock.hpp"
#include "runtime/collectives/agreement.hpp"
#include "runtime/session/rank_runtime.hpp"
#include "runtime/train/resume_plan.hpp"

#include <chrono>
#include <utility>

namespace smp {

namespace {

/// Adds the seconds for which it lives.
class stopwatch {
public:
  explicit stopwatch(double& sum) : sum_(sum) {
    // nop
  }

  ~stopwatch() {
    sum_ += std::chrono::duration<double>(clock::now() - begin_).count();
  }

  stopwatch(const stopwatch&) = delete;
  stopwatch& operator=(const stopwatch&) = delete;

private:
  using clock = std::chrono::steady_clock;

  double& sum_;
  const clock::time_point begin_ = clock::now();
};

} // namespace

run_checkpoints::run_checkpoints(const train_config& config,
                                 const data_source& data,
                                 const distributed_model_base& model,
                                 distributed_optimizer& optimizer,
                                 listener on_saved)
  : config_(config),
    data_(data),
    model_(model),
    optimizers_{&optimizer},
    on_saved_(std::move(on_saved)) {
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

void run_checkpoints::save_if_due(uint64_t step, bool interrupted) {
  if (begun_ == step || !due(step, interrupted))
    return;
  await();
  begun_ = step;
  stopwatch stands_still{seconds_};
  pending_ = std::make_unique<pending_checkpoint>(
    config_.checkpoint.dir, step, model_, optimizers_,
    checkpoint_options{.num_kept_partial_checkpoints = config_.checkpoint.keep,
                       .settings = checkpoint_settings(config_, data_)});
}

bool run_checkpoints::written() const {
  return pending_ && pending_->done() && session::current().rank() == 0;
}

void run_checkpoints::await() {
  if (!pending_)
    return;
  auto pending = std::move(pending_);
  double no_wait = 0;
  saved_checkpoint saved;
  {
    stopwatch stands_still{pending->done() ? no_wait : seconds_};
    saved = pending->await();
  }
  on_saved_(pending->step(), saved);
}

} // namespace smp
