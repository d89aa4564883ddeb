#include "apps/smp-train/command_line.hpp"

#include "apps/smp-train/modes.hpp"
#include "runtime/base/nearest_name.hpp"
#include "runtime/base/print_stderr.hpp"
#include "runtime/config/config_schema.hpp"
#include "runtime/launch/environment.hpp"
#include "transport/build_id.hpp"
#include "transport/network/addresses.hpp"

#include <CLI/CLI.hpp>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <utility>

namespace smp::app {

namespace {

constexpr const char* description
  = "Trains the model of a configuration file over pipeline ranks. Starts the\n"
    "ranks itself, or joins as one when mpirun, srun or another launcher did.";

constexpr const char* about_keys
  = "Every key of the configuration can be set on the command line as\n"
    "--table.key=value, e.g. --train.steps=20; docs/config.md lists them.\n";

constexpr const char* about_runs
  = "\n"
    "Exit codes: 0 done, 2 bad command line or configuration, 3 a rank "
    "failed,\n"
    "4 stalled, 5 the loss is not finite, 130 interrupted. With\n"
    "--train.max_restarts=N a run that lost a rank or a machine is started\n"
    "again, from its newest checkpoint (docs/recovery.md).\n"
    "\n"
    "Example: smp-train config/quickstart.toml --ranks 2 --train.steps=20";

constexpr const char* about_verify
  = "\n"
    "The single-process run does not go through the pipeline. Compared\n"
    "are loss, every gradient, every updated parameter and buffer, the "
    "results\n"
    "and the number of calls of every module; docs/verify.md has the details.\n"
    "\n"
    "Exit codes: 0 equal, 1 different, 2 bad command line or configuration,\n"
    "3 a rank failed, 4 stalled, 5 both losses are not finite, 130 "
    "interrupted.\n"
    "\n"
    "Example: smp-train verify config/quickstart.toml --steps 2 --json "
    "out.json";

const std::map<std::string, log_level> levels{
  {"error", log_level::error},
  {"warn", log_level::warn},
  {"info", log_level::info},
  {"debug", log_level::debug},
};

struct raw_options {
  command_line result;
  std::optional<uint64_t> ranks;
  std::string keys;
  std::string level = "info";
};

/// The options that all commands have.
void add_common_options(CLI::App& app, raw_options& x) {
  app.set_help_flag("-h,--help", "Print this and exit");
  app.add_option("CONFIG", x.result.config, "The configuration (TOML)");
  app
    .add_option("--ranks", x.ranks,
                "Number of ranks: sets smp.pipeline_parallel_degree, or, "
                "with smp.ddp = true, smp.ranks")
    ->type_name("N");
  app.allow_extras();
  app.footer(about_keys);
}

void add_run_options(CLI::App& app, raw_options& x) {
  app
    .add_option("--run-dir", x.result.run_dir,
                "Where config.toml, metrics.jsonl, logs and the model go; "
                "default: a new directory runs/TIME-CONFIG; one that holds a "
                "run is refused")
    ->type_name("DIR");
  app
    .add_option("--log-level", x.level,
                "error, warn, info (default) or debug (every step in the logs)")
    ->type_name("LEVEL");
  app
    .add_option("--keys", x.keys,
                "The keys of a run over several machines: sets transport.keys")
    ->type_name("DIR");
}

void add_nodes_options(CLI::App& app, nodes_command& x) {
  app
    .add_option("--nodes", x.nodes,
                "The run is on N machines, with this command on each; under "
                "srun and the like, as one process on each")
    ->type_name("N")
    ->check(CLI::Range(1, 65536));
  app
    .add_option("--node-rank", x.node,
                "Which machine this is, from 0; default: as srun says")
    ->type_name("K");
  app
    .add_option("--master", x.master,
                "Name or address of machine 0; default: MASTER_ADDR and "
                "MASTER_PORT")
    ->type_name("HOST:PORT");
  app
    .add_option("--ranks-per-node", x.ranks,
                "Ranks of each machine, or one number for all; default: an "
                "equal share")
    ->type_name("N,...")
    ->delimiter(',')
    ->allow_extra_args(false);
  app
    .add_option("--hosts", x.hosts,
                "Start the run on these machines by ssh, with this many ranks "
                "each; an IPv6 address is [X]:N")
    ->type_name("HOST:N,...")
    ->delimiter(',')
    ->allow_extra_args(false);
}

void add_keys_options(CLI::App& app, raw_options& x) {
  app.set_help_flag("-h,--help", "Print this and exit");
  app.add_option("DIR", x.result.keys, "A folder that does not exist yet")
    ->required();
  app.footer(
    "\nEach machine of the run gets a copy that only its user can "
    "read\n(docs/machines.md).");
}

void add_verify_options(CLI::App& app, verify_command& x) {
  app
    .add_option("--steps", x.steps,
                "Steps to compare; default: 3, with smp.static_mode 3 that are "
                "replayed")
    ->type_name("N")
    ->check(CLI::Range(1, 1000000));
  app
    .add_option("--modes", x.modes,
                "Compare in each of these modes instead of the configured one: "
                "dynamic, fast, static, static+fast, deterministic, "
                "deterministic+static, deterministic+fast, "
                "deterministic+static+fast, or all; one of them under mpirun "
                "and the like, and over several machines")
    ->type_name("MODE,...")
    ->delimiter(',')
    ->allow_extra_args(false)
    ->check(CLI::IsMember(names_of_modes()));
  app.add_flag("--split", x.split,
               "Place modules on the ranks in turn instead of as the "
               "configuration says: whatever can cross ranks does");
  app.add_option("--json", x.json, "Write the result to FILE, for tools")
    ->type_name("FILE");
  app.footer(std::string{about_keys} + about_verify);
}

void add_partition_options(CLI::App& app, partition_command& x) {
  app.add_option("--json", x.json, "Write the decision to FILE, for tools")
    ->type_name("FILE");
  app
    .add_option("--tree", x.tree,
                "Partition the tree in FILE (docs/partition.md) instead of the "
                "model of a configuration")
    ->type_name("FILE");
  app.add_option("--devices", x.devices, "With --tree: number of devices")
    ->type_name("D")
    ->check(CLI::Range(1, 65536));
  app
    .add_option("--memory-weight", x.memory_weight,
                "With --tree: weight of memory against time, 0 to 1; default "
                "0.8")
    ->type_name("A")
    ->check(CLI::Range(0.0, 1.0));
  app
    .add_option("--strategy", x.strategy,
                "With --tree: balanced (default) or paper")
    ->type_name("S")
    ->check(CLI::IsMember({"balanced", "paper"}));
}

void add_schedule_options(CLI::App& app, schedule_command& x) {
  app.add_option("--svg", x.svg, "Write the picture to FILE")
    ->type_name("FILE");
  app.add_option("--json", x.json, "Write the predicted step to FILE")
    ->type_name("FILE");
}

/// @returns which options do not go together, or nothing.
std::string complaint(const command_line& x) {
  auto& y = x.partition;
  if (y.tree.empty()) {
    if (y.devices > 0)
      return "--devices goes with --tree; with a configuration write --ranks";
    if (y.memory_weight)
      return "--memory-weight goes with --tree; with a configuration write "
             "--smp.memory_weight=A";
    if (y.strategy)
      return "--strategy goes with --tree; with a configuration write "
             "--smp.strategy=S";
    return {};
  }
  if (!x.config.empty() || !x.overrides.empty())
    return fmt::format(
      "--tree goes without a configuration and its keys, but "
      "there is '{}'",
      x.config.empty() ? x.overrides[0] : x.config);
  if (y.devices == 0)
    return "--tree needs --devices D";
  return {};
}

/// What the user does not say, the launcher that started this process on each
/// machine does: srun --ntasks-per-node=1.
/// @returns what is wrong, or nothing
std::string take_place(nodes_command& x) {
  if (x.nodes == 0 || (x.node && !x.master.empty()))
    return {};
  auto place = read_place_in_run(std::getenv);
  if (!place)
    return {};
  if (!x.node && place->world_size != x.nodes)
    return fmt::format(
      "--nodes {}, but by {} there are {} processes: start one on each machine "
      "(srun --ntasks-per-node=1), or give --node-rank K",
      x.nodes, place->told_by, place->world_size);
  if (!x.node)
    x.node = place->rank;
  if (x.master.empty() && place->rendezvous_port != 0)
    x.master = endpoint(place->rendezvous_address, place->rendezvous_port);
  return {};
}

/// @returns which options do not go together, or nothing.
std::string complaint(const nodes_command& x) {
  if (!x.hosts.empty())
    return x.nodes > 0 || x.node || !x.ranks.empty()
             ? "--hosts says it all: leave --nodes, --node-rank and "
               "--ranks-per-node out"
             : "";
  if (x.nodes == 0)
    return x.node || !x.master.empty() || !x.ranks.empty()
             ? "--node-rank, --master and --ranks-per-node go with --nodes N"
             : "";
  if (!x.node || x.master.empty())
    return "--nodes needs --node-rank K and --master HOST:PORT, or a launcher "
           "that starts it on each machine, with MASTER_ADDR and MASTER_PORT";
  if (*x.node >= x.nodes)
    return fmt::format("--node-rank {} must be less than --nodes {}", *x.node,
                       x.nodes);
  return {};
}

/// torchrun's names of our options, folded.
constexpr std::pair<std::string_view, std::string_view> of_torchrun[] = {
  {"nprocpernode", "ranks"},
  {"masteraddr", "master"},
  {"masterport", "master"},
};

/// @param name of an option that `app` does not have, without its hyphens
/// @returns "; did you mean --train.steps?", or nothing
std::string hint_for_unknown_option(std::string_view name,
                                    const CLI::App& app) {
  std::vector<std::string_view> known;
  for (auto* option : app.get_options())
    for (auto& x : option->get_lnames())
      known.push_back(x);
  auto meant = nearest_name(name, known);
  for (auto& [theirs, ours] : of_torchrun)
    if (folded_name(name) == theirs
        && std::find(known.begin(), known.end(), ours) != known.end())
      meant = ours;
  if (meant.empty())
    meant = key_meant_by(name); // without its table
  return meant.empty() ? std::string{}
                       : fmt::format("; did you mean --{}?", meant);
}

/// @returns what is wrong with an argument that `app` did not take, or nothing.
std::string complaint(const std::string& x, const CLI::App& app) {
  if (!x.starts_with("--"))
    return fmt::format("unexpected argument '{}'", x);
  auto name = x.substr(0, x.find('='));
  if (name.find('.') == std::string::npos)
    return fmt::format("unknown option {}{}", name,
                       hint_for_unknown_option(name.substr(2), app));
  if (x.find('=') == std::string::npos)
    return fmt::format("{} has no value: write {}=VALUE", name, name);
  return {};
}

/// @param x the argument in the place of a command or the configuration
/// @param commands all commands except training
/// @returns what is wrong if `x` is a word but not a file, or nothing
std::string complaint(const std::string& x,
                      std::vector<std::string_view> commands) {
  std::error_code ignored;
  if (x.empty() || x.find_first_of("./") != std::string::npos
      || std::filesystem::exists(x, ignored))
    return {};
  const auto list = fmt::format("{}", fmt::join(commands, ", "));
  constexpr std::string_view train = "train";
  commands.push_back(train);
  auto meant = nearest_name(x, commands);
  return fmt::format(
    "'{}' is neither a command nor a file{}; commands: {}; "
    "without one, smp-train CONFIG trains",
    x,
    meant.empty()    ? ""
    : meant == train ? "; did you mean smp-train CONFIG?"
                     : fmt::format("; did you mean {}?", meant),
    list);
}

/// Adds the key that `--keys` sets. @returns what is wrong, or nothing
std::string apply_keys(raw_options& x) {
  if (x.keys.empty())
    return {};
  constexpr std::string_view key = "--transport.keys=";
  for (auto& y : x.result.overrides)
    if (y.starts_with(key))
      return "--keys and --transport.keys set the same key; give one of them";
  x.result.overrides.push_back(std::string{key} + x.keys);
  return {};
}

/// The program's options and commands, bound to one `raw_options`.
struct command_parser {
  explicit command_parser(raw_options& x);

  /// The names of all commands.
  std::vector<std::string_view> names() const {
    std::vector<std::string_view> result;
    for (auto& [what, app] : commands)
      result.push_back(app->get_name());
    return result;
  }

  /// @returns the command that was given, with its own options
  std::pair<command, const CLI::App*> parsed() const {
    for (auto& [what, app] : commands)
      if (app->parsed())
        return {what, app};
    return {command::train, &root};
  }

  CLI::App root{description, "smp-train"};
  std::vector<std::pair<command, CLI::App*>> commands;
};

command_parser::command_parser(raw_options& x) {
  add_common_options(root, x);
  add_run_options(root, x);
  add_nodes_options(root, x.result.nodes);
  root.set_version_flag("--version", build_id(), "Print the version and exit");
  root.footer(std::string{about_keys} + about_runs);
  auto add = [&](command what, const char* name,
                 const char* text) -> CLI::App& {
    auto& result = *root.add_subcommand(name, text);
    add_common_options(result, x);
    commands.emplace_back(what, &result);
    return result;
  };
  add(command::check, "check",
      "Check configuration, data, model and partition without training; prints "
      "one error per line");
  add_partition_options(
    add(command::partition, "partition",
        "Trace the model, partition it and print the decision without "
        "training; or partition a tree given as data"),
    x.result.partition);
  add_schedule_options(
    add(command::schedule, "schedule",
        "Check the schedule and draw the predicted step without training"),
    x.result.schedule);
  auto& keys = *root.add_subcommand(
    "keys", "Make the keys of a run over several machines");
  add_keys_options(keys, x);
  commands.emplace_back(command::keys, &keys);
  auto& verify = add(
    command::verify, "verify",
    "Run the job over its ranks and in one process, side by side, and "
    "compare; names the first module that differs");
  add_run_options(verify, x);
  add_nodes_options(verify, x.result.nodes);
  add_verify_options(verify, x.result.verify);
}

/// Takes the remaining arguments as overrides, and checks everything.
/// @returns what is wrong, or nothing
std::string finish(raw_options& x, const CLI::App& app) {
  x.result.overrides = app.remaining();
  for (auto& argument : x.result.overrides)
    if (auto text = complaint(argument, app); !text.empty())
      return text;
  // Last: which key it sets depends on another.
  if (x.ranks)
    x.result.overrides.push_back(fmt::format("--ranks={}", *x.ranks));
  if (auto text = apply_keys(x); !text.empty())
    return text;
  if (!started_by_our_launcher()) { // which has checked this
    if (auto text = take_place(x.result.nodes); !text.empty())
      return text;
    if (auto text = complaint(x.result.nodes); !text.empty())
      return text;
  }
  if (auto text = complaint(x.result); !text.empty())
    return text;
  auto level = levels.find(x.level);
  if (level == levels.end())
    return fmt::format("--log-level {}: write error, warn, info or debug",
                       x.level);
  x.result.level = level->second;
  if (x.result.what != command::keys && x.result.config.empty()
      && x.result.partition.tree.empty())
    return "CONFIG is missing, e.g. smp-train config/quickstart.toml";
  return {};
}

} // namespace

std::optional<command_line> parse_command_line(int argc, char** argv,
                                               int& exit_code) {
  constexpr int bad_usage = 2;
  auto fail = [&exit_code](const std::string& text) {
    print_stderr("smp-train: {} (see smp-train --help)\n", text);
    exit_code = bad_usage;
    return std::nullopt;
  };
  raw_options x;
  command_parser parser{x};
  try {
    parser.root.parse(argc, argv);
  } catch (const CLI::Success& e) {
    exit_code = parser.root.exit(e);
    return std::nullopt;
  } catch (const CLI::ParseError& e) {
    return fail(e.what());
  }
  auto [what, app] = parser.parsed();
  x.result.what = what;
  x.result.words.assign(argv, argv + argc);
  if (what == command::train)
    if (auto text = complaint(x.result.config, parser.names()); !text.empty())
      return fail(text);
  if (auto text = finish(x, *app); !text.empty())
    return fail(text);
  return x.result;
}

} // namespace smp::app
