#include "runtime/launch/launch_place.hpp"

#include "runtime/base/print_stderr.hpp"
#include "runtime/launch/environment.hpp"
#include "runtime/launch/secret_handover.hpp"
#include "runtime/launch/shared_segments.hpp"
#include "runtime/process/control_group.hpp"
#include "runtime/process/shared_flights.hpp"
#include "transport/network/addresses.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <fstream>
#include <numeric>
#include <utility>

#include <unistd.h>

namespace smp {

namespace {

/// The other launchers derive the same id from the secret.
std::string run_id_of(const run_secret& x) {
  std::string result;
  for (auto byte : x.token("run id"))
    result += fmt::format("{:02x}", std::to_integer<unsigned>(byte));
  return result;
}

/// What another machine is told.
/// @returns nothing if it gave up
std::optional<gate_answer>
ask_first(const launch_options& x, const network_choice& network,
          const std::optional<repeated_question>& again) {
  if (again)
    return ask_master(network.master, x.nodes.port, *network.line, *again);
  return ask_master(network.master, x.nodes.port, *network.line);
}

} // namespace

std::string to_text(const attempt_note& x) {
  return fmt::format("{} {} {} {}", x.restarts, x.newest ? 1 : 0,
                     fmt::join(x.shares, ","), x.log_dir);
}

attempt_note attempt_note_from(const std::string& text) {
  attempt_note result;
  auto* at = text.data();
  auto* end = at + text.size();
  auto number = [&](char after) {
    uint64_t read = 0;
    auto [next, problem] = std::from_chars(at, end, read);
    if (problem != std::errc{} || next == end || *next != after)
      throw config_error(
        "the first machine does not say which attempt at the run this is: all "
        "machines need the same version of the program");
    at = next + 1;
    return read;
  };
  result.restarts = number(' ');
  result.newest = number(' ') == 1;
  auto is_last = [&] {
    return std::find(at, end, ' ') < std::find(at, end, ',');
  };
  while (!is_last())
    result.shares.push_back(number(','));
  result.shares.push_back(number(' '));
  result.log_dir.assign(at, end);
  return result;
}

namespace {

/// @throws error (config) if other machines cannot reach the first one
network_choice network_of(const launch_options& x) {
  if (x.nodes.ranks_of.empty())
    return {};
  rank_environment env;
  env.rank = x.nodes.node; // only who is the first counts
  env.world_size = x.ranks;
  env.rendezvous_address = x.nodes.master;
  env.rendezvous_port = x.nodes.port;
  env.supervised = true;
  auto result = choose_network(env, x.session);
  if (!result.line)
    throw config_error(x.nodes.master
                       + " is loopback: other machines do not reach it");
  return result;
}

} // namespace

std::optional<launch_place>
find_place(const launch_options& x, attempt_note note,
           const std::optional<repeated_question>& again) {
  launch_place result;
  result.machine = x.nodes.node;
  result.network = network_of(x);
  result.progress = progress_descriptor();
  result.secret = run_secret::make();
  result.note = std::move(note);
  if (!result.first()) {
    auto told = ask_first(x, result.network, again);
    if (!told)
      return std::nullopt;
    result.secret = told->secret;
    auto log_dir = std::move(result.note.log_dir);
    result.note = attempt_note_from(told->note);
    if (!log_dir.empty())
      result.note.log_dir = std::move(log_dir);
  }
  auto& shares = result.note.shares;
  if (result.machine >= shares.size())
    throw config_error(fmt::format(
      "--nodes: the first machine has {} of them, here it is {} and more",
      shares.size(), result.machine));
  auto mine = shares.begin() + static_cast<std::ptrdiff_t>(result.machine);
  result.ranks = *mine;
  result.first_rank = std::accumulate(shares.begin(), mine, uint64_t{0});
  result.world_size = std::accumulate(mine, shares.end(), result.first_rank);
  result.run_id = run_id_of(result.secret);
  result.flights = flight_descriptor(result.ranks);
  result.no_shared_memory = no_room_for_shared_memory(shared_memory_folder(),
                                                      result.ranks);
  return result;
}

rank_progress launch_place::progress_of(uint64_t rank) const {
  return told_progress(progress.get(), rank - first_rank);
}

std::map<std::string, std::string>
launch_place::variables_of(uint64_t rank, const launch_options& x,
                           int secret_fd, uint16_t port) const {
  auto result = x.environment;
  for (auto& [name, value] : variables_before_exec)
    if (std::getenv(name) == nullptr)
      result.emplace(name, value);
  result["SMP_RANK"] = std::to_string(rank);
  result["SMP_LOCAL_RANK"] = std::to_string(rank - first_rank);
  result["SMP_WORLD_SIZE"] = std::to_string(world_size);
  result["SMP_LOCAL_SIZE"] = std::to_string(ranks);
  result["SMP_RUN_ID"] = run_id;
  result[secret_descriptor_variable] = std::to_string(secret_fd);
  result[progress_descriptor_variable] = std::to_string(progress.get());
  if (flights)
    result[flight_descriptor_variable] = std::to_string(flights.get());
  result["SMP_RENDEZVOUS"] = endpoint(network.master, port);
  result[no_shared_memory_variable] = no_shared_memory.value_or("");
  result[run_dir_variable] = note.log_dir;
  result[restart_variable] = std::to_string(note.restarts);
  // Its stderr is a pipe; progress lines depend on what is behind it.
  bool terminal = rank == 0 && ::isatty(STDERR_FILENO) == 1;
  result["SMP_TERMINAL"] = terminal ? "1" : "0";
  return result;
}

namespace {

/// @returns argv of this process
std::vector<std::string> own_command() {
  std::ifstream file{"/proc/self/cmdline", std::ios::binary};
  std::vector<std::string> result;
  for (std::string x; std::getline(file, x, '\0');)
    result.push_back(x);
  return result;
}

} // namespace

process_group::options launch_place::group_options(const launch_options& x,
                                                   int secret_fd) const {
  process_group::options result;
  result.command = x.command;
  if (x.command.empty()) {
    result.command = own_command();
    result.program = "/proc/self/exe";
  }
  result.size = ranks;
  result.first_rank = first_rank;
  result.log_dir = log_dir();
  result.why_killed = [before = read_control_group()] {
    return why_killed(before, read_control_group());
  };
  result.verdict = x.verdict;
  result.blocked_signal = x.blocked_signal;
  result.inherited = {secret_fd, progress.get()};
  if (flights)
    result.inherited.push_back(flights.get());
  result.ends_with_output = std::getenv(ends_with_output_variable) != nullptr;
  result.grace = x.grace;
  result.interrupt_grace = x.interrupt_grace;
  return result;
}

void launch_place::write_flights() const {
  if (log_dir().empty())
    return;
  auto why = smp::write_flights(log_dir(), flights.get(), rank_id{first_rank},
                                ranks);
  if (!why.empty())
    print_stderr("smp: cannot write what ranks did last: {}\n", why);
}

} // namespace smp
