#include "runtime/launch/launch_place.hpp"

#include "runtime/launch/environment.hpp"
#include "runtime/launch/secret_handover.hpp"
#include "runtime/launch/shared_segments.hpp"
#include "runtime/process/shared_flights.hpp"
#include "transport/network/addresses.hpp"

#include <fmt/format.h>

#include <charconv>
#include <cstdlib>
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
  return fmt::format("{} {} {}", x.restarts, x.newest ? 1 : 0, x.log_dir);
}

attempt_note attempt_note_from(const std::string& text) {
  attempt_note result;
  auto* end = text.data() + text.size();
  auto [at, problem] = std::from_chars(text.data(), end, result.restarts);
  if (problem != std::errc{} || end - at < 3 || at[0] != ' ' || at[2] != ' '
      || (at[1] != '0' && at[1] != '1'))
    throw config_error(
      "the first machine does not say which attempt at the run this is: all "
      "machines need the same version of the program");
  result.newest = at[1] == '1';
  result.log_dir.assign(at + 3, end);
  return result;
}

std::optional<launch_place>
find_place(const launch_options& x, attempt_note note,
           const std::optional<repeated_question>& again) {
  launch_place result;
  result.ranks = x.ranks;
  result.note = std::move(note);
  result.progress = progress_descriptor();
  result.secret = run_secret::make();
  auto& nodes = x.nodes;
  if (!nodes.ranks_of.empty()) {
    auto mine = nodes.ranks_of.begin()
                + static_cast<std::ptrdiff_t>(nodes.node);
    result.first_rank = std::accumulate(nodes.ranks_of.begin(), mine,
                                        uint64_t{0});
    result.ranks = *mine;
    rank_environment env;
    env.rank = result.first_rank;
    env.world_size = x.ranks;
    env.rendezvous_address = nodes.master;
    env.rendezvous_port = nodes.port;
    env.supervised = true;
    result.network = choose_network(env, x.session);
    if (!result.network.line)
      throw config_error(nodes.master
                         + " is loopback: other machines do not reach it");
  }
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
  result["SMP_WORLD_SIZE"] = std::to_string(x.ranks);
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

} // namespace smp
