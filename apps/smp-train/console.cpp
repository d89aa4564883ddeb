#include "apps/smp-train/console.hpp"

#include "apps/report/text_layout.hpp"
#include "runtime/base/print_stderr.hpp"
#include "runtime/checkpoint/checkpoint.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <utility>

namespace smp::app {

namespace {

constexpr const char* header
  = "       step     loss         lr   grad norm {:>10}   step time   bubble  "
    "    ETA";

/// Label and text in columns.
void item(const char* label, const std::string& text) {
  print_stderr("  {:<10}{}\n", label, text);
}

void show_memory(const train_summary& x) {
  for (size_t rank = 0; rank < x.peak_memory.size(); ++rank)
    item(
      rank == 0 ? "memory" : "",
      fmt::format("{} peak on rank {}", bytes_text(x.peak_memory[rank]), rank));
  for (size_t rank = 0; rank < x.device_memory.size(); ++rank)
    item(rank == 0 ? "device" : "",
         fmt::format("{} peak of {} on rank {}",
                     bytes_text(x.device_memory[rank].first),
                     bytes_text(x.device_memory[rank].second), rank));
}

} // namespace

console::console(const train_config& config, options x)
  : config_(config), options_(x) {
  // nop
}

std::string console::bold(const std::string& x) const {
  return options_.terminal ? "\x1b[1m" + x + "\x1b[0m" : x;
}

void console::clear_line() {
  if (line_open_)
    print_stderr("\r\x1b[K");
  line_open_ = false;
}

void console::begin(const std::string& config_path, uint64_t ranks,
                    const std::string& run_dir) {
  if (quiet() || options_.again)
    return;
  print_stderr("{}\n",
               bold(fmt::format("smp-train {} on {} rank{}", config_path, ranks,
                                ranks == 1 ? "" : "s")));
  item("run dir", run_dir);
}

void console::on_decision(const partition_decision& x, session& s,
                          model_state& state, trainable& whole) {
  if (quiet())
    return;
  lone_decision run{s, state, whole, x};
  activations_ = activations_at_start(run, config_);
}

void console::on_start(const train_start& x) {
  tokens_per_sample_ = x.tokens_per_sample;
  if (quiet()) {
    if (options_.level >= log_level::warn)
      for (auto& text : x.warnings)
        print_stderr("warning: {}\n", text);
    return;
  }
  if (options_.again)
    return;
  item("model", fmt::format("{}, {} parameters", config_.model.type,
                            with_commas(x.parameters)));
  auto* label = "device";
  for (auto& text : devices_text(x.places))
    item(std::exchange(label, ""), text);
  if (!x.precision.empty())
    item("precision", x.precision);
  if (!x.resumed_from.empty())
    item("resume",
         fmt::format("from {}, after {} steps", x.resumed_from, x.steps_done));
  for (auto& change : x.changes)
    item("changed", change);
  if (auto& file = config_.train.init_from; !file.empty())
    item("weights", x.resumed_from.empty()
                      ? "parameters and buffers from " + file
                      : "of the checkpoint, not of " + file);
  const auto samples = tokens_per_sample_ > 0 ? fmt::format(
                         "sequences of {} tokens", tokens_per_sample_)
                                              : "samples";
  item("step", fmt::format("{} {} in {} microbatch{}, {}", x.batch_size,
                           samples, config_.smp.microbatches,
                           config_.smp.microbatches == 1 ? "" : "es",
                           config_.smp.pipeline));
  print_stderr("\n{}{}\n{}\n",
               options_.terminal ? x.partition : without_colours(x.partition),
               needs_text(x.needs, activations_, config_),
               bold(fmt::format(header, tokens_per_sample_ > 0 ? "tokens/s"
                                                               : "samples/s")));
}

std::string console::row(const step_metrics& x) const {
  const auto left = static_cast<double>(config_.train.steps - x.step);
  const auto eta = left > 0
                     ? fmt::format("{:>9}", duration_text(left * mean_seconds_))
                     : "";
  const auto throughput = x.samples_per_second
                          * static_cast<double>(
                            std::max<uint64_t>(tokens_per_sample_, 1));
  return fmt::format(
    "{:>11}{:>9.4f}{:>11.2e}{:>12.3f}{:>11}{:>12}{:>7.1f} "
    "%{}{}",
    fmt::format("{}/{}", x.step, config_.train.steps), plain_number(x.loss),
    x.lr, plain_number(x.grad_norm), rate_text(throughput),
    duration_text(x.step_seconds), 100 * x.bubble_ratio, eta,
    x.skipped.empty() ? "" : "  skipped");
}

void console::on_step(const step_metrics& x) {
  // Recent steps count most; the first one, a warm-up, soon has no weight.
  constexpr double memory = 0.8;
  mean_seconds_ = ++steps_ <= 2
                    ? x.step_seconds
                    : memory * mean_seconds_ + (1 - memory) * x.step_seconds;
  if (quiet())
    return;
  const bool stays = x.step == 1 || x.step == config_.train.steps
                     || x.step % config_.train.log_interval == 0
                     || !x.skipped.empty();
  if (!options_.terminal && !stays)
    return;
  print_stderr("{}{}{}", std::exchange(line_open_, false) ? "\r\x1b[K" : "",
               row(x), stays ? "\n" : "");
  line_open_ = !stays;
}

void console::on_evaluation(uint64_t step, double loss) {
  if (quiet())
    return;
  clear_line();
  print_stderr("{:>11}{:>9.4f}  held out\n",
               fmt::format("{}/{}", step, config_.train.steps),
               plain_number(loss));
}

void console::on_checkpoint(uint64_t step, const saved_checkpoint& x) {
  if (quiet())
    return;
  clear_line();
  print_stderr("{:>11}  checkpoint at step {}, {}; steps waited {}\n",
               fmt::format("{}/{}", step, config_.train.steps), step,
               bytes_text(x.bytes), duration_text(x.seconds));
}

void console::end_with_files(const train_summary& x,
                             const std::string& run_dir) const {
  item("files", run_dir + "/metrics.jsonl");
  if (!x.model_file.empty())
    item("", x.model_file);
  if (x.last_checkpoint.empty())
    return;
  item("", x.last_checkpoint);
  if (x.interrupted)
    item("resume",
         options_.resumes.empty() ? "with the same command" : options_.resumes);
}

void console::end(const train_summary& x, const std::string& run_dir) {
  clear_line();
  print_stderr(
    "\n{}\n", bold(fmt::format("{} after {} of {} steps in {}",
                               x.interrupted ? "interrupted" : "done", x.steps,
                               config_.train.steps, duration_text(x.seconds))));
  if (steps_ > 0)
    item("loss",
         fmt::format("{:.4f} first, {:.4f} last{}", plain_number(x.first_loss),
                     plain_number(x.last_loss),
                     tokens_per_sample_ > 0 ? " (nat per token)" : ""));
  const auto held_out = plain_number(x.held_out_loss.value_or(0));
  if (x.held_out_loss && x.unigram_entropy)
    item("held out",
         fmt::format("{:.4f}, unigram entropy {:.4f}: {:.4f} {}", held_out,
                     *x.unigram_entropy,
                     std::abs(*x.unigram_entropy - held_out),
                     held_out <= *x.unigram_entropy ? "below" : "above"));
  else if (x.held_out_loss)
    item("held out", fmt::format("{:.4f}", held_out));
  item("bubble", fmt::format("{:.1f} % of the ranks' time in the pipeline",
                             100 * x.bubble_ratio));
  item("sent", fmt::format("{} requests, {}", with_commas(x.requests),
                           bytes_text(x.bytes_sent)));
  if (x.ran_again > 0)
    item("run again", fmt::format("{} of {} steps, see \"ran_again\" in "
                                  "metrics.jsonl",
                                  x.ran_again, steps_));
  if (x.skipped > 0)
    item("skipped", fmt::format("{} of {} steps updated nothing, see "
                                "\"skipped\" in metrics.jsonl",
                                x.skipped, steps_));
  if (config_.smp.static_mode)
    item("static", fmt::format("{} of {} steps replayed{}", x.replayed, steps_,
                               x.fell_back > 0 ? fmt::format(
                                 ", {} diverged from the record", x.fell_back)
                                               : ""));
  if (x.checkpoints > 0)
    item("saved",
         fmt::format("{} checkpoints, which held up the steps for {} ({:.1f} "
                     "%)",
                     x.checkpoints, duration_text(x.checkpoint_seconds),
                     100 * x.checkpoint_seconds
                       / (x.seconds + x.checkpoint_seconds)));
  show_memory(x);
  end_with_files(x, run_dir);
  if (x.sample.empty())
    return;
  auto prompt = printable(x.prompt);
  std::replace(prompt.begin(), prompt.end(), '\n', ' ');
  print_stderr("\n{}\n{}\n",
               bold(fmt::format("sample of {} characters, after \"{}\"",
                                x.sample.size(), prompt)),
               printable(x.sample));
}

} // namespace smp::app
