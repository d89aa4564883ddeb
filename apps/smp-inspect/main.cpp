// smp-inspect: asks a run what its actors do. Argument parsing and printing;
// what is asked and how it is shown is in apps/report/.

#include "actors/flight/trace_file.hpp"
#include "apps/report/exit_codes.hpp"
#include "apps/report/flight_report.hpp"
#include "apps/report/left_behind.hpp"
#include "apps/report/run_json.hpp"
#include "apps/report/run_text.hpp"
#include "apps/report/stack_report.hpp"
#include "apps/report/text_layout.hpp"
#include "apps/web/page.hpp"
#include "apps/web/run_feed.hpp"
#include "apps/web/run_server.hpp"
#include "transport/error.hpp"

#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <exception>
#include <fstream>
#include <optional>
#include <string>
#include <vector>

namespace smp::app {

namespace {

constexpr const char* about
  = "Asks a run what its actors do: by its directory, of smp-train or of a "
    "program\n"
    "of your own (--ranks), or by its address. Answers within a second, even "
    "if ranks\n"
    "are stuck; on a busy machine it asks again, for some ten seconds.";

constexpr const char* about_codes
  = "\n"
    "Exit codes: 0 the run is well, 1 something is wrong (a stall, a rank that "
    "is\n"
    "lost, stopped, silent or whose actors are blocked, nobody answers), 2 "
    "bad\n"
    "command line or no such run, 3 the run has ended.\n"
    "\n"
    "Example: smp-inspect runs/20261123-020544-quickstart waits";

/// Whoever asks wants to know why a run does not go on: an answer that is late
/// is better than none.
constexpr std::chrono::seconds patience{10};

struct options {
  std::string place;
  std::string secret;
  std::string actor;
  flight_selection flight;
  std::optional<uint64_t> rank;
  uint64_t steps = 3;
  uint64_t limit = 60; // seconds
  std::string output;
  std::string web;
  std::string prometheus;
  bool json = false;
};

void print(const std::string& x) {
  std::fwrite(x.data(), 1, x.size(), stdout);
}

/// The answer to one command, from a run that answers.
struct answer {
  const char* key;
  json value;
  std::string text;
};

answer answer_of(const std::string& command, const options& x,
                 const run_status& status) {
  if (command == "ls")
    return {"actors", actors_json(status), actor_list(status)};
  if (command == "tree")
    return {"tree", tree_json(status), actor_tree(status)};
  if (command == "waits")
    return {"waits", waits_json(status), waits_text(status)};
  if (command == "health")
    return {"health", health_json(status), health_text(status)};
  if (command == "comm")
    return {"comm", comm_json(status), comm_text(status)};
  auto actor = find_actor(status, x.actor);
  if (!actor)
    throw config_error(x.actor
                       + ": no actor of this run has this id; ls has them all");
  return {"actor", to_json(*actor), *actor_text(status, x.actor)};
}

/// What ranks did last, of a run that answers or of one that has ended.
int show_flight(const options& x) {
  run_source source{x.place, x.secret};
  auto look = source.look(patience);
  auto logs = source.events(look);
  if (logs.empty())
    throw config_error(x.place + ": no rank answers, and there is no record of "
                                 "what ranks did last: runs leave one if they "
                                 "fail, stall or get SIGQUIT");
  if (x.json) {
    auto result = head_json(x.place, look);
    result["flight"] = flight_json(logs, x.flight);
    print(result.dump(2) + '\n');
  } else {
    print(state_text(x.place, look) + '\n' + flight_text(logs, x.flight));
  }
  return code_of(look);
}

/// @returns why the stacks of this rank cannot be had, as far as it is known
/// before it is asked
std::optional<std::string> is_away(const rank_entry& x) {
  using enum rank_health;
  if (x.health == well || x.health == blocked || x.health == silent)
    return std::nullopt;
  return fmt::format("rank {} is {}{}{}: it has no thread that could answer",
                     x.rank.value, smp::to_string(x.health),
                     x.why.empty() ? "" : ": ", x.why);
}

std::string is_silent(const rank_entry& x) {
  return fmt::format(
    "rank {} does not answer; from outside, py-spy dump "
    "--native --pid {} or gdb -p {} shows its process on {}",
    x.rank.value, x.status.pid, x.status.pid, x.status.host);
}

/// What the threads of live ranks are doing now.
int show_stacks(const options& x) {
  run_source source{x.place, x.secret};
  auto look = source.look(patience);
  if (!look.status) {
    fmt::print(stderr,
               "smp-inspect: {}: {}, {}; only a live rank has stacks, what "
               "ranks did last: smp-inspect RUN flight\n",
               x.place, to_string(look.what), look.text);
    return code_of(look);
  }
  auto ranks = look.status->ranks;
  if (x.rank && *x.rank >= ranks.size())
    throw config_error(fmt::format("{}: no rank {}; its ranks are 0 to {}",
                                   x.place, *x.rank, ranks.size() - 1));
  std::erase_if(ranks, [&](auto& y) {
    return x.rank.value_or(y.rank.value) != y.rank.value;
  });
  std::vector<process_stacks> stacks;
  if (!std::ranges::all_of(ranks,
                           [](auto& y) { return is_away(y).has_value(); }))
    stacks = source.stacks(look);
  std::erase_if(stacks, [&](auto& y) {
    return std::ranges::count(ranks, y.rank, &rank_entry::rank) == 0;
  });
  std::vector<std::string> problems;
  for (auto& y : ranks)
    if (std::ranges::count(stacks, y.rank, &process_stacks::rank) == 0)
      problems.push_back(is_away(y).value_or(is_silent(y)));
  if (x.json) {
    auto result = head_json(x.place, look);
    result["stacks"] = stack_json(stacks);
    result["no_stacks"] = problems;
    print(result.dump(2) + '\n');
  } else {
    print(state_text(x.place, look) + stack_text(stacks));
    for (auto& y : problems)
      fmt::print(stderr, "smp-inspect: {}\n", y);
  }
  return problems.empty() ? code_of(look) : exit_wrong;
}

/// Of any run of smp-train, also one that is over.
int show_config(const options& x) {
  auto settings = read_settings(x.place);
  if (settings.empty())
    throw config_error(x.place
                       + ": no config.toml; only runs of smp-train have one, "
                         "in their run directory");
  if (x.json) {
    json result = json::object();
    for (auto& y : settings)
      result[y.name] = {{"value", y.value},
                        {"origin", y.origin.empty() ? "default" : y.origin}};
    print(result.dump(2) + '\n');
    return exit_well;
  }
  for (auto& y : settings)
    print(printable(fmt::format("{:<44}{:<30}{}\n", y.name, y.value,
                                y.origin.empty() ? "default" : y.origin)));
  return exit_well;
}

/// Of a run that has placed its modules, also one that is over.
int show_partition(const options& x) {
  auto partition = stored_partition(x.place);
  if (partition.is_null())
    throw config_error(x.place
                       + ": no partition.json; rank 0 writes it in the first "
                         "step of a run that has a directory");
  print(x.json ? partition.dump(2) + '\n' : partition_text(partition));
  return exit_well;
}

/// What is left of the waits of a run that has ended.
std::string waits_left(const options& x) {
  auto waits = stored_waits(x.place);
  if (waits.is_null())
    return {};
  auto result = "its last stall: " + waits["chain"].get<std::string>() + '\n';
  for (auto& line : waits["all"])
    result += "  " + line.get<std::string>() + '\n';
  return result;
}

int trace_run(const options& x) {
  run_source source{x.place, x.secret};
  auto look = source.look(patience);
  fmt::print(stderr, "smp-inspect: tracing {} steps of {}\n", x.steps, x.place);
  auto logs = source.trace(look, x.steps, std::chrono::seconds{x.limit});
  auto [first, last] = complete_steps(logs);
  auto path = x.output;
  if (path.empty())
    path = fmt::format("trace-{}-{}.json", first, last);
  std::ofstream out{path};
  write_trace(out, logs);
  if (!out.flush())
    throw config_error(fmt::format("{}: cannot be written", path));
  print(
    fmt::format("steps {} to {} of {} ranks are in {}, which "
                "ui.perfetto.dev shows\n",
                first, last, logs.size(), path));
  return code_of(look);
}

/// One page with what is known of the run, for later and for others.
int write_report(const options& x) {
  run_feed feed{x.place, x.secret};
  auto parts = feed.look(patience);
  auto path = x.output.empty() ? "report.html" : x.output;
  std::ofstream out{path};
  out << page_html(parts);
  if (!out.flush())
    throw config_error(fmt::format("{}: cannot be written", path));
  print(fmt::format("{}: {}, is in {}\n", x.place,
                    parts["run"]["state"].get<std::string>(), path));
  return exit_well;
}

/// Until Ctrl-C, or until whoever started this ends it.
int serve_run(const options& x) {
  serve_options served{x.place, x.secret, {}, {}};
  if (!x.web.empty())
    served.web = http_address::parse(x.web);
  if (!x.prometheus.empty())
    served.prometheus = http_address::parse(x.prometheus);
  if (!served.web && !served.prometheus)
    served.web = http_address::parse("127.0.0.1:8080");
  // Before there are threads, so that none of them is hit.
  sigset_t ends;
  ::sigemptyset(&ends);
  ::sigaddset(&ends, SIGINT);
  ::sigaddset(&ends, SIGTERM);
  ::pthread_sigmask(SIG_BLOCK, &ends, nullptr);
  run_server server{served};
  for (auto& url : server.urls())
    print(url + '\n');
  std::fflush(stdout);
  int number = 0;
  ::sigwait(&ends, &number);
  return exit_well;
}

int inspect_run(const std::string& command, const options& x) {
  if (command == "report")
    return write_report(x);
  if (command == "serve")
    return serve_run(x);
  if (command == "flight")
    return show_flight(x);
  if (command == "stack")
    return show_stacks(x);
  if (command == "trace")
    return trace_run(x);
  if (command == "config")
    return show_config(x);
  if (command == "partition")
    return show_partition(x);
  run_source source{x.place, x.secret};
  auto look = source.look(patience);
  if (x.json) {
    auto result = head_json(x.place, look);
    if (look.status) {
      auto part = answer_of(command, x, *look.status);
      result[part.key] = std::move(part.value);
    } else if (command == "waits") {
      result["waits"] = stored_waits(x.place);
    }
    print(result.dump(2) + '\n');
    return code_of(look);
  }
  auto text = state_text(x.place, look);
  if (look.status)
    text += '\n' + answer_of(command, x, *look.status).text;
  else if (command == "waits")
    text += waits_left(x);
  print(text);
  return code_of(look);
}

void add_questions(CLI::App& app, options& x) {
  auto add = [&](const char* name, const char* what) {
    auto* command = app.add_subcommand(name, what);
    command->add_flag("--json", x.json, "Print JSON, for tools");
    return command;
  };
  add("ls", "All actors: state, since when, what they hold");
  add("tree", "The same, each below the one that made it");
  add("actor", "All that one actor tells")
    ->add_option("ID", x.actor, "As ls prints it: r0.server")
    ->required();
  add("waits",
      "Who waits for whom, and who is at the end of the chain; of a "
      "run that has ended, its last stall");
  add("comm", "What ranks sent to each other");
  add("health",
      "Whether each rank is well; only the exit code, for scripts: "
      "> /dev/null");
  add("config", "Each setting of a run, and where it was made");
  add("partition",
      "Which module is on which device, of a run of smp-train; also of one "
      "that is over");
  auto* flight = add("flight",
                     "What ranks did last; also of a run that failed");
  flight->add_option("--last", x.flight.last, "So many events")
    ->capture_default_str();
  flight->add_option("--rank", x.flight.rank, "Of this rank only");
  add("stack",
      "What the threads of live ranks are doing now, Python's frames "
      "before those of C++")
    ->add_option("RANK", x.rank, "Of this rank only");
}

void add_files(CLI::App& app, options& x) {
  auto* trace = app.add_subcommand(
    "trace",
    "Keep all events of the next steps, in a file for ui.perfetto.dev");
  trace->add_option("--steps", x.steps, "So many")
    ->capture_default_str()
    ->check(CLI::Range(1, 1000));
  trace->add_option("--output", x.output, "Default: trace-FIRST-LAST.json")
    ->type_name("FILE");
  trace->add_option("--limit", x.limit, "Seconds until it gives up, at most 60")
    ->capture_default_str()
    ->check(CLI::Range(1, 60));
  auto* report = app.add_subcommand(
    "report", "Write a page on the run, live or over, as one HTML file");
  report->add_option("--output", x.output, "Default: report.html")
    ->type_name("FILE");
  auto* serve = app.add_subcommand(
    "serve",
    "Show the run in a browser and to Prometheus, until Ctrl-C; "
    "without options the page at 127.0.0.1:8080");
  serve->add_option("--web", x.web, "The page is at this address")
    ->type_name("HOST:PORT");
  serve->add_option("--prometheus", x.prometheus, "Metrics are there, /metrics")
    ->type_name("HOST:PORT");
}

int run(int argc, char** argv) {
  CLI::App app{about, "smp-inspect"};
  options x;
  app.set_help_flag("-h,--help", "Print this and exit"); // subcommands inherit
  app.add_option("RUN", x.place, "RUN_DIR or HOST:PORT")->required();
  app
    .add_option("--secret", x.secret,
                "For an address: a copy of the run directory's inspect.entry")
    ->type_name("FILE");
  app.require_subcommand(1);
  app.footer(about_codes);
  add_questions(app, x);
  add_files(app, x);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    return app.exit(e) == 0 ? exit_well : exit_usage;
  }
  return inspect_run(app.get_subcommands().front()->get_name(), x);
}

} // namespace

} // namespace smp::app

int main(int argc, char** argv) {
  try {
    return smp::app::run(argc, argv);
  } catch (const std::exception& e) {
    fmt::print(stderr, "smp-inspect: {}\n", e.what());
    return smp::app::exit_usage;
  }
}
