// smp-inspect: asks a run what its actors do. Argument parsing and printing;
// what is asked and how it is shown is in apps/report/.

#include "apps/report/exit_codes.hpp"
#include "apps/report/run_json.hpp"
#include "apps/report/run_text.hpp"
#include "transport/error.hpp"

#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include <chrono>
#include <cstdio>
#include <exception>
#include <string>

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
  if (command == "comm")
    return {"comm", comm_json(status), comm_text(status)};
  auto actor = find_actor(status, x.actor);
  if (!actor)
    throw config_error(x.actor
                       + ": no actor of this run has this id; ls has them all");
  return {"actor", to_json(*actor), *actor_text(status, x.actor)};
}

int inspect_run(const std::string& command, const options& x) {
  run_source source{x.place, x.secret};
  auto look = source.look(patience);
  if (x.json) {
    auto result = head_json(x.place, look);
    if (look.status) {
      auto part = answer_of(command, x, *look.status);
      result[part.key] = std::move(part.value);
    }
    print(result.dump(2) + '\n');
    return code_of(look);
  }
  auto text = state_text(x.place, look);
  if (look.status)
    text += '\n' + answer_of(command, x, *look.status).text;
  print(text);
  return code_of(look);
}

int run(int argc, char** argv) {
  CLI::App app{about, "smp-inspect"};
  options x;
  app.set_help_flag("-h,--help", "Print this and exit");
  app.add_option("RUN", x.place, "RUN_DIR or HOST:PORT")->required();
  app
    .add_option("--secret", x.secret,
                "For an address: a copy of the run directory's inspect.entry")
    ->type_name("FILE");
  app.require_subcommand(1);
  app.footer(about_codes);
  auto add = [&](const char* name, const char* what) {
    auto* command = app.add_subcommand(name, what);
    command->set_help_flag("-h,--help", "Print this and exit");
    command->add_flag("--json", x.json, "Print JSON, for tools");
    return command;
  };
  add("ls", "All actors: state, since when, what they hold");
  add("tree", "The same, each below the one that made it");
  add("actor", "All that one actor tells")
    ->add_option("ID", x.actor, "As ls prints it: r0.server")
    ->required();
  add("waits", "Who waits for whom, and who is at the end of the chain");
  add("comm", "What ranks sent to each other");
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
