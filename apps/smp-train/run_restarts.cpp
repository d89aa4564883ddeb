#include "apps/smp-train/run_restarts.hpp"

#include "apps/smp-train/modes.hpp"
#include "runtime/checkpoint/checkpoint_dir.hpp"
#include "runtime/train/metrics.hpp"

#include <fmt/format.h>

#include <utility>

namespace smp::app {

namespace {

/// @param settings "--key=value", in the place of those that were given
std::vector<std::string>
with_settings(std::vector<std::string> words,
              const std::vector<std::string>& settings) {
  for (auto& x : settings) {
    auto name = x.substr(0, x.find('='));
    words = without_options(words, {name});
    if (name == "--smp.ranks")
      words = without_options(words, {"--ranks"});
  }
  words.insert(words.end(), settings.begin(), settings.end());
  return words;
}

} // namespace

run_restarts::run_restarts(const command_line& line, const train_config& config,
                           std::string run_dir,
                           std::vector<std::string> command)
  : line_(line),
    config_(config),
    metrics_(std::move(run_dir) + "/metrics.jsonl"),
    command_(std::move(command)),
    began_at_(next_origin().step) {
  std::string why;
  if (config.train.elastic && fit(ranks_of(config) - 1, why) == 0)
    throw config_error(fmt::format(
      "train.elastic = true, but the run cannot do with fewer ranks: {}", why));
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

std::vector<std::string> run_restarts::command(bool newest,
                                               uint64_t ranks) const {
  std::vector<std::string> settings;
  if (newest && config_.checkpoint.resume != "auto")
    settings.emplace_back("--checkpoint.resume=auto");
  if (ranks != ranks_of(config_))
    for (auto& x : settings_with(ranks))
      settings.push_back(std::move(x));
  return with_settings(command_, settings);
}

std::vector<std::string> run_restarts::settings_with(uint64_t ranks) const {
  auto all = ranks_of(config_);
  return {fmt::format("--smp.ranks={}", ranks),
          fmt::format("--data.batch_size={}",
                      config_.data.batch_size.value() * all / ranks),
          fmt::format("--smp.microbatches={}",
                      config_.smp.microbatches * all / ranks)};
}

uint64_t run_restarts::fit(uint64_t ranks) const {
  std::string ignored;
  return fit(ranks, ignored);
}

uint64_t run_restarts::fit(uint64_t ranks, std::string& why) const {
  auto& smp = config_.smp;
  auto replica = smp.pipeline_parallel_degree * smp.tensor_parallel_degree;
  auto microbatches = smp.microbatches * ranks_of(config_);
  why = fmt::format("one replica needs {} of them", replica);
  if (!config_.data.batch_size) {
    why = "data.batch_size is not set, so a step cannot keep its samples";
    return 0;
  }
  std::string first;
  for (ranks -= ranks % replica; ranks > 0; ranks -= replica) {
    if (microbatches % ranks != 0)
      continue;
    auto report = read_config(
      line_.config, with_settings(line_.overrides, settings_with(ranks)), {});
    if (report.errors.empty())
      return ranks;
    if (first.empty())
      first = fmt::format("with {}, {}", ranks, report.errors.front());
  }
  if (!first.empty())
    why = first;
  return 0;
}

} // namespace smp::app
