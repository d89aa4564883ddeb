#include "apps/smp-train/verify.hpp"

#include "runtime/base/print_stderr.hpp"
#include "runtime/files/file_io.hpp"
#include "runtime/session/rank_runtime.hpp"
#include "runtime/session/session.hpp"
#include "runtime/verify/verify.hpp"

#include <ATen/Context.h>
#include <fmt/format.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>

namespace smp::app {

namespace {

bool on_device(const session& s) {
  return !s.internals().device().is_cpu();
}

/// Without them two runs on a device may differ by themselves: sums in TF32,
/// and in an order that depends on timing.
void use_exact_algorithms() {
  auto& torch = at::globalContext();
  torch.setAllowTF32CuBLAS(false);
  torch.setAllowTF32CuDNN(false);
  torch.setDeterministicCuDNN(true);
  constexpr bool only_warn = true; // of what has no such algorithm
  torch.setDeterministicAlgorithms(true, only_warn);
  torch.setDeterministicFillUninitializedMemory(false);
}

void print_head(const session& s, const command_line& cmd,
                const train_config& config, const std::string& run_dir) {
  print_stderr(
    "smp-train verify {}: {} rank{} against one process\n"
    "  run dir   {}\n"
    "  model     {}{}\n"
    "  step      {} microbatch{}, {}\n{}\n"
    "       step         loss  one process  differences  of allowed\n",
    cmd.config, s.size(), s.size() == 1 ? "" : "s", run_dir, config.model.type,
    config.train.init_from.empty()
      ? ""
      : "\n  weights   from " + config.train.init_from,
    config.smp.microbatches, config.smp.microbatches == 1 ? "" : "es",
    config.smp.pipeline,
    on_device(s) ? fmt::format("  device    {}, without TF32, by deterministic "
                               "algorithms\n",
                               s.internals().device().str())
                 : "");
}

void print_step(const verify_step& x) {
  print_stderr("{:>11}{:>13.6f}{:>13.6f}{:>13}{:>10.2g} %\n", x.step, x.loss,
               x.reference_loss, x.differences, 100 * x.share);
}

} // namespace

void prepare_split(train_config& config) {
  if (config.smp.pipeline_parallel_degree < 2)
    throw error{error_code::config,
                "--split needs two ranks or more: --ranks 2"};
  config.smp.auto_partition = false;
  config.manual_partition.clear();
  // Resets settings of a partition by cost: they have no effect here, so the
  // session would refuse them.
  if (config.smp.trace_device == "gpu")
    config.smp.trace_device = "auto";
  if (config.smp.tensor_parallel_degree == 1)
    config.smp.optimize = "memory";
  config.smp = without_idle_keys(std::move(config.smp));
}

void check_json_file(const std::string& path) {
  if (path.empty())
    return;
  const bool is_there = std::filesystem::exists(path);
  if (!std::ofstream{path, std::ios::app})
    throw error{error_code::config,
                fmt::format("--json {}: cannot be written: {}", path,
                            std::strerror(errno))};
  // The file written at the end may have another name, or never be written.
  if (!is_there)
    std::filesystem::remove(path);
}

verify_end verify(session& s, const command_line& cmd,
                  const train_config& config, const std::string& run_dir,
                  train_listener& listener, const std::atomic<bool>& stop) {
  const bool shows = s.rank() == 0 && cmd.level >= log_level::info;
  if (on_device(s))
    use_exact_algorithms();
  if (shows)
    print_head(s, cmd, config, run_dir);
  verify_options options;
  options.steps = cmd.verify.steps.value_or(steps_to_verify(config));
  if (!cmd.verify.steps)
    options.replays = enough_steps;
  options.split = cmd.verify.split;
  if (shows)
    options.on_step = print_step;
  auto result = smp::verify(s, config, run_dir, listener, stop, options);
  const bool interrupted = !result.complete && result.equal();
  if (s.rank() == 0) {
    if (!cmd.verify.json.empty())
      write_text(cmd.verify.json, to_json(result));
    print_stderr("{}{}\n", shows ? "\n" : "",
                 interrupted ? "interrupted" : to_text(result));
  }
  return interrupted      ? verify_end::interrupted
         : result.equal() ? verify_end::equal
                          : verify_end::different;
}

} // namespace smp::app
