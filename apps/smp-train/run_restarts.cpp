#include "apps/smp-train/run_restarts.hpp"

#include "apps/smp-train/modes.hpp"
#include "runtime/checkpoint/checkpoint_dir.hpp"
#include "runtime/train/metrics.hpp"

#include <utility>

namespace smp::app {

run_restarts::run_restarts(const train_config& config, std::string run_dir,
                           std::vector<std::string> command)
  : config_(config),
    metrics_(std::move(run_dir) + "/metrics.jsonl"),
    command_(std::move(command)),
    began_at_(next_origin().step) {
  // nop
}

run_restarts::origin run_restarts::next_origin() const {
  auto& dir = config_.checkpoint.dir;
  auto& resume = config_.checkpoint.resume;
  origin result;
  if (resume != "auto" && resume != "none")
    if (auto named = newest_checkpoint(resume))
      result = {named->step, named->folder, false};
  if (auto newest = dir.empty() ? std::nullopt : newest_checkpoint(dir);
      newest && (result.checkpoint.empty() || newest->step > result.step))
    result = {newest->step, newest->folder, true};
  return result;
}

run_position run_restarts::look() const {
  auto next = next_origin();
  auto last = steps_done_in(metrics_);
  auto steps = last.value_or(began_at_);
  return {.steps = steps,
          .made_steps = steps > began_at_,
          .next_from = next.step,
          .checkpoint = next.checkpoint,
          .newest = next.newest};
}

void run_restarts::record(const restart_note& x) {
  add_restart(metrics_, x);
  began_at_ = x.from_step;
}

std::vector<std::string> run_restarts::command(bool newest) const {
  if (!newest || config_.checkpoint.resume == "auto")
    return command_;
  auto result = without_options(command_, {"--checkpoint.resume"});
  result.emplace_back("--checkpoint.resume=auto");
  return result;
}

} // namespace smp::app
