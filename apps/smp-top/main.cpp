// smp-top: what the ranks of a run do, live. Argument parsing and printing; the
// table itself is apps/report/rank_table.hpp.

#include "apps/report/exit_codes.hpp"
#include "apps/report/flight_report.hpp"
#include "apps/report/run_json.hpp"
#include "apps/report/run_text.hpp"
#include "apps/smp-top/poller.hpp"
#include "apps/smp-top/screen.hpp"
#include "transport/error.hpp"

#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdio>
#include <exception>
#include <string>
#include <thread>
#include <utility>

namespace smp::app {

namespace {

constexpr const char* about
  = "What the ranks of a run do, live. RUN is the directory of a run, of "
    "smp-train\n"
    "or of a program of your own (--ranks), or the address of a run.";

constexpr const char* about_columns
  = "\n"
    "state    FWD mb3 M: the forward phase of microbatch 3, in module M;\n"
    "         WAIT M <- r1: for the answer of module M from rank 1\n"
    "busy     share of the time since the last look in which the rank "
    "executed\n"
    "bubble   share of its last step in which it did not\n"
    "queue    requests and answers that wait for their turn\n"
    "pp/tp/dp position of the rank in its groups\n"
    "arena    largest use of the arenas for tensors on their way\n"
    "device   where the rank computes, and the memory that it uses there, at\n"
    "         most used, and of how much; a narrow screen has no room for all "
    "else\n"
    "\n"
    "Below the table, the last seconds of each rank: F forward, B backward,\n"
    "o optimizer, c communication, . it waits.\n"
    "\n"
    "Keys: a actors, w who waits for whom, f what ranks did last, s sort,\n"
    "h help, ESC back to the table, arrows and pages scroll, q quit.\n"
    "Colours: not if NO_COLOR is set.\n"
    "\n"
    "Exit codes: 0 q was pressed, or --once found all well; 1 --once found\n"
    "something wrong, 2 bad command line or no such run, 3 the run has ended.\n"
    "\n"
    "Example: smp-top runs/20261123-020544-quickstart";

/// Between the two looks of --once, from which counters become rates.
constexpr std::chrono::milliseconds once_interval{250};

/// How long to wait for a key before drawing what is new.
constexpr std::chrono::milliseconds draw_interval{50};

/// In columns, without a terminal.
constexpr size_t once_width = 120;

struct options {
  std::string place;
  std::string secret;
  double interval = 0.5;
  bool once = false;
  bool json = false;
};

std::atomic<bool> interrupted = false;

void on_signal(int) {
  interrupted = true;
}

int print_once(const options& x, run_source& source, run_look look) {
  rank_rows counted;
  auto rows = counted.add(look, std::chrono::steady_clock::now());
  if (look.status) {
    std::this_thread::sleep_for(once_interval);
    look = source.look();
    rows = counted.add(look, std::chrono::steady_clock::now());
  }
  if (x.json) {
    auto result = head_json(x.place, look);
    auto& ranks = result["ranks"] = json::array();
    for (auto& row : rows)
      ranks.push_back(to_json(row));
    fmt::print("{}\n", result.dump(2));
  } else {
    for (auto& line : table_of(x.place, look, rows, once_width))
      fmt::print("{}\n", line.text);
  }
  return code_of(look);
}

/// What the user looks at.
struct view {
  enum class page : uint8_t { ranks, actors, waits, flight, help };

  page shown = page::ranks;
  row_order order = row_order::rank;
  size_t top = 0; // line

  /// @returns whether something changes
  bool take(screen::key x, size_t height);
};

bool view::take(screen::key x, size_t height) {
  using key = screen::key;
  auto turn_to = [this](page y) {
    // The same key leads back.
    shown = shown == y ? page::ranks : y;
    top = 0;
  };
  switch (x) {
    case key::none:
    case key::quit:
      return false;
    case key::up:
      top -= top > 0 ? 1 : 0;
      break;
    case key::down:
      ++top;
      break;
    case key::page_up:
      top -= std::min(top, height);
      break;
    case key::page_down:
      top += height;
      break;
    case key::ranks:
      shown = page::ranks;
      top = 0;
      break;
    case key::actors:
      turn_to(page::actors);
      break;
    case key::waits:
      turn_to(page::waits);
      break;
    case key::flight:
      turn_to(page::flight);
      break;
    case key::help:
      turn_to(page::help);
      break;
    case key::sort:
      order = order == last_of(order)
                ? row_order{}
                : static_cast<row_order>(static_cast<uint8_t>(order) + 1);
      break;
    case key::resized:
      break;
  }
  return true;
}

std::vector<table_line> lines_for(const view& v, const options& x,
                                  const poller::result& now, size_t width) {
  using page = view::page;
  auto rows = now.rows;
  sort_rows(rows, v.order);
  if (v.shown == page::help)
    return lines_of(std::string{about} + '\n' + about_columns, width);
  if (v.shown == page::ranks || !now.look.status) {
    auto result = table_of(x.place, now.look, rows, width);
    auto strips = strips_of(now.events, rows, width);
    result.insert(result.end(), strips.begin(), strips.end());
    return result;
  }
  auto result = table_of(x.place, now.look, {}, width);
  auto text = v.shown == page::actors  ? actor_tree(*now.look.status)
              : v.shown == page::waits ? waits_text(*now.look.status)
                                       : flight_text(now.events, {});
  for (auto& line : lines_of('\n' + text, width))
    result.push_back(std::move(line));
  return result;
}

std::string keys_of(const view& v) {
  return fmt::format(
    "q quit  a actors  w waits  f flight  s sort: {}  h help  "
    "arrows scroll",
    to_string(v.order));
}

/// Draws until the user quits or the run ends. @returns the last look
run_look draw_until_over(const options& x, run_source& source, run_look first) {
  screen terminal;
  poller poll{
    source, std::chrono::milliseconds{static_cast<int64_t>(x.interval * 1000)},
    std::move(first)};
  poller::result shown;
  view v;
  while (!interrupted && shown.look.what != run_look::state::ended) {
    auto news = poll.news();
    if (news)
      shown = std::move(*news);
    auto key = terminal.await_key(draw_interval);
    if (key == screen::key::quit)
      break;
    auto room = terminal.height();
    if (!v.take(key, room) && !news)
      continue;
    auto lines = lines_for(v, x, shown, terminal.width());
    v.top = std::min(v.top, lines.size() - std::min(room, lines.size()));
    terminal.draw(lines, v.top, keys_of(v));
  }
  return shown.look;
}

int show(const options& x) {
  run_source source{x.place, x.secret};
  auto look = source.look();
  if (x.once)
    return print_once(x, source, std::move(look));
  if (look.what != run_look::state::ended)
    look = draw_until_over(x, source, std::move(look));
  if (look.what != run_look::state::ended)
    return exit_well;
  fmt::print("{}", state_text(x.place, look));
  return exit_ended;
}

int run(int argc, char** argv) {
  CLI::App app{about, "smp-top"};
  options x;
  app.set_help_flag("-h,--help", "Print this and exit");
  app.add_option("RUN", x.place, "RUN_DIR or HOST:PORT")->required();
  app
    .add_option("--secret", x.secret,
                "For an address: a copy of the run directory's inspect.entry")
    ->type_name("FILE");
  app
    .add_option("--interval", x.interval,
                "Seconds between two updates; default: 0.5")
    ->type_name("SECONDS")
    ->check(CLI::Range(0.1, 3600.0));
  auto* once = app.add_flag("--once", x.once, "Print the table and exit");
  app.add_flag("--json", x.json, "With --once: print JSON, for tools")
    ->needs(once);
  app.footer(about_columns);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    return app.exit(e) == 0 ? exit_well : exit_usage;
  }
  struct sigaction action = {};
  action.sa_handler = on_signal;
  ::sigaction(SIGINT, &action, nullptr);
  ::sigaction(SIGTERM, &action, nullptr);
  return show(x);
}

} // namespace

} // namespace smp::app

int main(int argc, char** argv) {
  try {
    return smp::app::run(argc, argv);
  } catch (const std::exception& e) {
    fmt::print(stderr, "smp-top: {}\n", e.what());
    return smp::app::exit_usage;
  }
}
