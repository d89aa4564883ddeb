// smp-train: trains the model of a configuration file. Argument parsing and
// printing; the training itself is runtime/train/trainer.hpp.

#include "apps/smp-train/check.hpp"
#include "apps/smp-train/command_line.hpp"
#include "apps/smp-train/console.hpp"
#include "apps/smp-train/modes.hpp"
#include "apps/smp-train/partition.hpp"
#include "apps/smp-train/rank_log.hpp"
#include "apps/smp-train/run_restarts.hpp"
#include "apps/smp-train/run_signals.hpp"
#include "apps/smp-train/schedule.hpp"
#include "apps/smp-train/test_settings.hpp"
#include "apps/smp-train/verify.hpp"
#include "runtime/base/print_stderr.hpp"
#include "runtime/collectives/agreement.hpp"
#include "runtime/collectives/current_rank.hpp"
#include "runtime/device/cuda_libraries.hpp"
#include "runtime/files/file_io.hpp"
#include "runtime/launch/environment.hpp"
#include "runtime/launch/error_exit.hpp"
#include "runtime/launch/hosts.hpp"
#include "runtime/launch/launcher.hpp"
#include "runtime/launch/network_choice.hpp"
#include "runtime/launch/run_dir.hpp"
#include "runtime/plan/planner.hpp"
#include "runtime/process/limits.hpp"
#include "runtime/session/groups.hpp"
#include "runtime/session/inspection.hpp"
#include "runtime/session/session.hpp"
#include "runtime/session/stalls.hpp"
#include "runtime/train/resume_plan.hpp"
#include "runtime/train/tensorboard_log.hpp"
#include "runtime/train/trainable.hpp"
#include "runtime/train/trainer.hpp"

#include <fmt/format.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <unistd.h>

namespace smp::app {

namespace {

constexpr int exit_done = 0;
constexpr int exit_different = 1;
constexpr int exit_usage = 2;
constexpr int exit_rank_failed = 3;
constexpr int exit_stalled = 4;
constexpr int exit_interrupted = 130;

/// Prints why this process ends, once: the first cause.
void tell(const std::string& x) {
  static std::atomic<bool> told = false;
  if (!told.exchange(true))
    tell_why(fmt::format("smp-train: {}\n", x), x.c_str());
}

// -- stalls -------------------------------------------------------------------

/// A thread that is stuck in user code cannot be stopped, and without our
/// launcher no other process ends this one.
void end_in_time(const std::string& text) {
  static std::atomic<bool> begun = false;
  if (begun.exchange(true)) // ranks may be threads
    return;
  std::thread{[text] {
    std::this_thread::sleep_for(std::chrono::seconds{2});
    if (!told_by_others(error_code::stalled))
      tell(text);
    std::_Exit(exit_stalled);
  }}.detach();
}

// -- the run directory --------------------------------------------------------

/// @returns the directory of a run, which exists from now on
std::string run_dir_of(const command_line& cmd) {
  return make_run_dir(cmd.run_dir,
                      std::filesystem::path{cmd.config}.stem().string());
}

/// Writes `run_dir`/config.toml, with which the run can be repeated.
/// @throws error (config) naming the file
void write_run_config(const std::string& run_dir, const train_config& x) {
  write_text(run_dir + "/config.toml",
             "# The configuration of this run, with all defaults; smp-train "
             "with this file\n# runs the same again. Comments say where a key "
             "was set.\n\n"
               + to_toml(x, true));
}

// -- a rank -------------------------------------------------------------------

/// Several listeners as one.
class listeners final : public train_listener {
public:
  void add(train_listener& x) {
    all_.push_back(&x);
  }

  void on_start(const train_start& start) override {
    for (auto* x : all_)
      x->on_start(start);
  }

  void on_decision(const partition_decision& decision, session& s,
                   model_state& state, trainable& whole) override {
    for (auto* x : all_)
      x->on_decision(decision, s, state, whole);
  }

  void on_step(const step_metrics& metrics) override {
    for (auto* x : all_)
      x->on_step(metrics);
  }

  void on_evaluation(uint64_t step, double loss) override {
    for (auto* x : all_)
      x->on_evaluation(step, loss);
  }

  bool wants_checkpoint() override {
    return take_wish_to_save();
  }

  void on_checkpoint(uint64_t step, const saved_checkpoint& saved) override {
    for (auto* x : all_)
      x->on_checkpoint(step, saved);
  }

private:
  std::vector<train_listener*> all_;
};

/// @returns the command that goes on with a run that is interrupted now; empty
/// if it is one of several that other programs start
std::string resume_command(const command_line& cmd,
                           const train_config& config) {
  auto here = read_rank_environment();
  if (cmd.nodes.nodes > 1 || (here && !here->supervised))
    return {};
  auto words = without_options(cmd.words, {"--run-dir"});
  if (config.checkpoint.resume != "auto") {
    words = without_options(words, {"--checkpoint.resume"});
    words.emplace_back("--checkpoint.resume=auto");
  }
  std::string result;
  for (auto& word : words)
    result += (result.empty() ? "" : " ") + shell_word(word);
  return result;
}

/// @returns null on rank 0 under our launcher, where the console is its log
std::shared_ptr<rank_log> log_of_rank(session& s, const command_line& cmd,
                                      const std::string& run_dir,
                                      bool supervised) {
  std::shared_ptr<rank_log> result;
  if (!supervised)
    result = std::make_shared<rank_log>(
      cmd.level, fmt::format("{}/log-{}.txt", run_dir, s.rank()));
  else if (s.rank() > 0)
    result = std::make_shared<rank_log>(cmd.level);
  if (result)
    result->info(fmt::format(
      "rank {} of {}, pp_rank {}, process {}, local rank {} of {} on {}",
      s.rank(), s.size(), s.pp_rank(), ::getpid(), local_rank(), local_size(),
      host_name()));
  return result;
}

/// @param supervised our launcher keeps stderr as this rank's log
/// @returns the exit code
int run_rank(session& s, const command_line& cmd, const train_config& config,
             bool supervised) {
  const auto run_dir = agree_everywhere(current_rank(), "smp.run_dir", [&] {
    auto known = s.run_dir();
    return known.empty() ? run_dir_of(cmd) : known;
  });
  // Before it writes files there: a reader that finds them may ask the run.
  inspectable_run inspected{s, run_dir};
  if (s.rank() > 0)
    make_run_dir(run_dir, {}); // for ranks of other machines
  else if (restart_number() == 0)
    write_run_config(run_dir, config);
  auto log = log_of_rank(s, cmd, run_dir, supervised);
  const bool compares = cmd.what == command::verify;
  std::optional<console> screen;
  if (s.rank() == 0 && !compares)
    screen.emplace(config, console::options{stderr_is_terminal(), cmd.level,
                                            restart_number() > 0,
                                            resume_command(cmd, config)});
  listeners all;
  if (log)
    all.add(*log);
  // Supervised, the log is the rank's stderr, which has the report already.
  if (!supervised)
    on_stall(s, [log](const std::string& text, bool ends) {
      log->info(text);
      if (ends)
        end_in_time(text);
    });
  if (screen) {
    screen->begin(cmd.config, s.size(), run_dir);
    all.add(*screen);
  }
  std::optional<tensorboard_log> events;
  if (s.rank() == 0 && config.tensorboard)
    all.add(events.emplace(run_dir + "/tensorboard"));
  try {
    if (compares) {
      auto end = verify(s, cmd, config, run_dir, all, interrupted());
      return end == verify_end::equal       ? exit_done
             : end == verify_end::different ? exit_different
                                            : exit_interrupted;
    }
    auto summary = train(s, config, run_dir, all, interrupted());
    // Of a run that goes on the launcher says all there is to say.
    if (screen && !begins_again())
      screen->end(summary, run_dir);
    if (log)
      log->info(summary.interrupted ? "interrupted" : "done");
    return summary.interrupted ? exit_interrupted : exit_done;
  } catch (const std::exception& e) {
    if (log)
      log->info(e.what());
    throw;
  }
}

/// Of a rank that another program started: nobody serves the run.
void tell_of_no_server(const session& s, const train_config& config) {
  auto& x = config.monitor;
  if (s.rank() == 0 && !(x.web.empty() && x.prometheus.empty()))
    print_stderr(
      "warning: monitor.web and monitor.prometheus are for runs that "
      "smp-train starts itself; for this one, run `smp-inspect "
      "RUN_DIR serve`\n");
}

/// This process is one rank.
int run_process(const command_line& cmd, const train_config& config,
                bool supervised) {
  catch_signals(config, supervised);
  session s{config.smp, shared_settings(config)};
  if (!supervised)
    tell_of_no_server(s, config);
  return run_rank(s, cmd, config, supervised);
}

/// All ranks are threads of this process.
int run_threads(const command_line& cmd, const train_config& config) {
  catch_signals(config, false);
  virtual_world_options world;
  world.config = config.smp;
  std::atomic<int> result = exit_done;
  run_virtual_world(ranks_of(config), world, [&](session& s) {
    auto code = run_rank(s, cmd, config, false);
    if (s.rank() == 0)
      result = code;
  });
  return result;
}

std::chrono::seconds interrupt_grace(const train_config& x) {
  return std::chrono::seconds{x.checkpoint.interrupt_grace};
}

/// The ranks are processes, started here.
/// @param arguments of each, the program's name first
int run_launcher(const command_line& cmd, const train_config& config,
                 std::vector<std::string> arguments) {
  launch_options options;
  if (cmd.what == command::verify)
    options.verdict = exit_different;
  options.ranks = ranks_of(config);
  options.session = config.smp;
  options.interrupt_grace = interrupt_grace(config);
  options.blocked_signal = save_signal(config);
  auto& nodes = cmd.nodes;
  if (nodes.nodes > 1)
    options.nodes = read_node(
      *nodes.node, shares_of(nodes.nodes, nodes.ranks, options.ranks),
      nodes.master);
  // The first machine chooses the directory, unless the user does.
  if (options.nodes.node == 0 || !cmd.run_dir.empty())
    options.log_dir = run_dir_of(cmd);
  options.stalls = stalls_of(config.smp);
  options.served = {config.monitor.web, config.monitor.prometheus};
  options.command = std::move(arguments);
  options.command[0] = std::filesystem::read_symlink("/proc/self/exe");
  std::optional<run_restarts> restarts;
  if (config.train.max_restarts > 0) {
    restarts.emplace(cmd, config, options.log_dir, options.command);
    options.restarts = {
      .limit = config.train.max_restarts,
      .look = [&] { return restarts->look(); },
      .record = [&](const restart_note& x) { restarts->record(x); },
      .command =
        [&](bool newest, uint64_t ranks) {
          return restarts->command(newest, ranks);
        }};
    if (config.train.elastic)
      options.restarts.fit = [&](uint64_t x) { return restarts->fit(x); };
  }
  return launch(options);
}

/// A launcher on each machine, started here by ssh.
int run_hosts(const command_line& cmd, const train_config& config,
              const std::vector<std::string>& arguments) {
  auto hosts = read_hosts(cmd.nodes.hosts, ranks_of(config));
  auto words = without_options(arguments, {"--hosts", "--master"});
  words[0] = std::filesystem::read_symlink("/proc/self/exe");
  return launch_on_hosts(hosts, words, cmd.nodes.master,
                         interrupt_grace(config),
                         config.train.max_restarts > 0);
}

/// Several modes are runs one after the other, of ranks that this command
/// starts on this machine.
/// @param is_rank this process is one that a launcher started
void check_modes(const command_line& cmd, const std::vector<run_mode>& modes,
                 bool is_rank) {
  if (modes.size() < 2)
    return;
  if (is_rank)
    throw config_error(
      "under mpirun, srun or torchrun, --modes takes one mode; without them "
      "smp-train starts its ranks itself, for one mode after the other");
  if (cmd.nodes.nodes > 1 || !cmd.nodes.hosts.empty())
    throw config_error("over several machines, --modes takes one mode");
}

/// With --nodes or --hosts a process starts ranks, whatever started it, and
/// only those are ranks.
std::optional<rank_environment> place_of(const command_line& cmd) {
  const bool starts = cmd.nodes.nodes > 0 || !cmd.nodes.hosts.empty();
  if (starts && !started_by_our_launcher())
    return std::nullopt;
  return read_rank_environment();
}

/// Who starts ranks can start them again.
/// @param x set in a rank
void check_restarts(const command_line& cmd, const train_config& config,
                    const std::optional<rank_environment>& x) {
  const bool other_launcher = x && !x->supervised;
  if (config.train.elastic && !x && cmd.nodes.nodes < 2
      && cmd.nodes.hosts.empty())
    throw config_error(
      "train.elastic is for runs over several machines (--nodes, --hosts), "
      "which may lose one; leave it out");
  if (config.train.max_restarts > 0 && other_launcher)
    throw config_error(fmt::format(
      "train.max_restarts = {} is for ranks that smp-train itself starts: "
      "under mpirun or srun, start one process on each machine, with --nodes "
      "N; or leave it out, and let Slurm (sbatch --requeue), Kubernetes "
      "(backoffLimit) or a loop give the command again, which goes on from "
      "checkpoint.dir",
      config.train.max_restarts));
}

/// Refuses each directory that already holds a run, before anything is written
/// to one of them.
void claim_run_dirs(const command_line& cmd,
                    const std::vector<run_mode>& modes) {
  // A run without a finished step has nothing that could be missed.
  const std::vector<std::string> signs{"metrics.jsonl"};
  if (modes.size() < 2)
    return claim_run_dir(cmd.run_dir, signs);
  for (auto& mode : modes)
    claim_run_dir(path_of_mode(cmd.run_dir, mode), signs);
}

/// Compares in one mode after the other.
/// @returns the exit code of the first one that is not equal
int run_modes(const command_line& cmd, const train_config& config,
              const std::vector<run_mode>& modes,
              const std::vector<std::string>& arguments) {
  int result = exit_done;
  std::string ends;
  for (auto& mode : modes) {
    auto one = cmd;
    one.run_dir = path_of_mode(cmd.run_dir, mode);
    one.verify.json = path_of_mode(cmd.verify.json, mode);
    auto mine = config;
    set_mode(mine, mode);
    auto words = without_options(arguments, {"--modes", "--json", "--run-dir"});
    words.insert(words.end(), {"--modes", mode.name});
    if (!one.run_dir.empty())
      words.insert(words.end(), {"--run-dir", one.run_dir});
    if (!one.verify.json.empty())
      words.insert(words.end(), {"--json", one.verify.json});
    print_stderr("mode {}\n", mode.name);
    auto code = mine.threads_as_ranks
                  ? run_threads(one, mine)
                  : run_launcher(one, mine, std::move(words));
    if (code == exit_interrupted)
      return code;
    if (result == exit_done)
      result = code;
    ends += fmt::format("{}{} {}", ends.empty() ? "" : ", ", mode.name,
                        code == exit_done        ? "equal"
                        : code == exit_different ? "different"
                                                 : "failed");
  }
  print_stderr("\nmodes: {}\n", ends);
  return result;
}

// -- commands -----------------------------------------------------------------

int run_check(const command_line& cmd, const train_config& config) {
  std::string partition;
  auto errors = check(config, partition);
  for (auto& text : errors)
    print_stderr("{}: {}\n", cmd.config, text);
  if (!errors.empty())
    return exit_usage;
  if (!stderr_is_terminal())
    partition = without_colours(partition);
  print_stderr("{}\n{}{}: no errors\n", partition, outlook_on_devices(config),
               cmd.config);
  return exit_done;
}

/// Checks model, data and checkpoints here, so that an error is reported once,
/// not by each rank.
void check_once(const train_config& config) {
  check_model(config);
  auto data = make_data(config, replicas_of(config));
  plan_resume(config, *data);
}

/// Whether this process tells what is odd about the configuration: one of the
/// run's does, and a comparison chooses its steps itself.
bool warns(const command_line& cmd,
           const std::optional<rank_environment>& environment) {
  const bool trains = cmd.what == command::train || cmd.what == command::check;
  const bool first = !environment
                     || (environment->rank == 0 && !environment->supervised);
  return trains && first && cmd.level >= log_level::warn;
}

/// A comparison begins with the first step, and leaves nothing behind.
train_config config_of(const command_line& cmd, config_report report) {
  if (cmd.what == command::verify) {
    report.config.checkpoint = {};
    report.config.train.max_restarts = 0;
    report.config.train.elastic = false;
  }
  return std::move(report.config);
}

/// @returns whether the configuration can be used
bool tell_of_config(const config_report& x, bool warns) {
  for (auto& text : x.errors)
    print_stderr("{}\n", text);
  if (warns && x.errors.empty())
    for (auto& text : x.warnings)
      print_stderr("warning: {}\n", text);
  return x.errors.empty();
}

/// Before anything of LibTorch, and only where ranks compute.
/// @param is_rank this process is one that a launcher started
void load_devices(const train_config& config, bool is_rank) {
  if ((is_rank || config.threads_as_ranks) && config.smp.device != "cpu")
    load_cuda();
}

int run(int argc, char** argv) {
  int exit_code = exit_done;
  auto cmd = parse_command_line(argc, argv, exit_code);
  if (!cmd)
    return exit_code;
  if (cmd->what == command::keys) {
    make_keys(cmd->keys);
    print_stderr(
      "{}: keys of a run; docs/machines.md says what to do with "
      "them\n",
      cmd->keys);
    return exit_done;
  }
  if (!cmd->partition.tree.empty()) {
    partition_tree_file(cmd->partition, stderr_is_terminal());
    return exit_done;
  }
  const auto environment = place_of(*cmd);
  auto report = read_config(cmd->config, cmd->overrides,
                            environment ? std::optional{environment->world_size}
                                        : std::nullopt);
  if (!tell_of_config(report, warns(*cmd, environment)))
    return exit_usage;
  auto config = config_of(*cmd, std::move(report));
  set_for_tests(config);
  if (cmd->verify.split)
    prepare_split(config);
  load_devices(config, environment.has_value());
  const auto modes = modes_of(cmd->verify.modes);
  if (modes.size() == 1)
    set_mode(config, modes.front());
  if (cmd->what == command::partition) {
    partition_config(cmd->partition, config, stderr_is_terminal());
    return exit_done;
  }
  if (cmd->what == command::check)
    return run_check(*cmd, config);
  if (cmd->what == command::schedule) {
    draw_schedule(cmd->schedule, config, stderr_is_terminal());
    return exit_done;
  }
  check_modes(*cmd, modes, environment.has_value());
  check_restarts(*cmd, config, environment);
  check_json_file(cmd->verify.json);
  // Our launcher checked this before its ranks began to write.
  if (!cmd->run_dir.empty() && cmd->nodes.node.value_or(0) == 0
      && !(environment && environment->supervised))
    claim_run_dirs(*cmd, modes);
  if (environment)
    return run_process(*cmd, config, environment->supervised);
  check_once(config);
  const std::vector<std::string> arguments{argv, argv + argc};
  if (!cmd->nodes.hosts.empty())
    return run_hosts(*cmd, config, arguments);
  if (modes.size() > 1)
    return run_modes(*cmd, config, modes, arguments);
  if (config.threads_as_ranks)
    return run_threads(*cmd, config);
  return run_launcher(*cmd, config, arguments);
}

/// @returns the exit code, whatever happens
int run_and_tell(int argc, char** argv) {
  try {
    hold_signals();
    prepare_process(argc, argv);
    end_on_uncaught_errors();
    return run(argc, argv);
  } catch (const error& e) {
    if (e.code() == error_code::rank_down)
      leave_word(last_word::heard);
    if (!told_by_others(e.code()))
      tell(e.what());
    return exit_code_of(e.code());
  } catch (const std::exception& e) {
    auto limit = exhausted_limit(e);
    tell(limit ? limit->what() : e.what());
    return limit ? exit_code_of(limit->code()) : exit_rank_failed;
  }
}

} // namespace

} // namespace smp::app

int main(int argc, char** argv) {
  smp::exit_at_once(smp::app::run_and_tell(argc, argv));
}
