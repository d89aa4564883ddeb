#include "runtime/launch/launcher.hpp"

#include "actors/cluster/membership.hpp"
#include "runtime/base/file_io.hpp"
#include "runtime/base/print_stderr.hpp"
#include "runtime/launch/environment.hpp"
#include "runtime/launch/limits.hpp"
#include "runtime/launch/process_group.hpp"
#include "runtime/launch/secret_handover.hpp"
#include "runtime/launch/shared_segments.hpp"
#include "transport/run_secret.hpp"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <fstream>

#include <unistd.h>

namespace smp {

namespace {

constexpr int code_stalled = 4;

/// Tells the run from all others.
std::string make_run_id() {
  std::array<std::byte, 16> bytes;
  fill_with_random_bytes(bytes);
  std::string result;
  for (auto x : bytes)
    result += fmt::format("{:02x}", std::to_integer<unsigned>(x));
  return result;
}

/// @returns argv of this process
std::vector<std::string> own_command() {
  std::ifstream file{"/proc/self/cmdline", std::ios::binary};
  std::vector<std::string> result;
  for (std::string x; std::getline(file, x, '\0');)
    result.push_back(x);
  return result;
}

std::map<std::string, std::string> variables_of(uint64_t rank,
                                                const launch_options& x,
                                                const std::string& run_id,
                                                int secret, uint16_t port) {
  auto result = x.environment;
  for (auto& [name, value] : variables_before_exec)
    if (std::getenv(name) == nullptr)
      result.emplace(name, value);
  result["SMP_RANK"] = result["SMP_LOCAL_RANK"] = std::to_string(rank);
  result["SMP_WORLD_SIZE"] = result["SMP_LOCAL_SIZE"] = std::to_string(x.ranks);
  result["SMP_RUN_ID"] = run_id;
  result[secret_descriptor_variable] = std::to_string(secret);
  result["SMP_RENDEZVOUS"] = fmt::format("127.0.0.1:{}", port);
  // Its stderr is a pipe; progress lines want to know what is behind it.
  bool terminal = rank == 0 && ::isatty(STDERR_FILENO) == 1;
  result["SMP_TERMINAL"] = terminal ? "1" : "0";
  return result;
}

int exit_code(const process_group::result& x) {
  if (x.interrupted)
    return code_interrupted;
  if (!x.cause)
    return x.code;
  switch (x.code) {
    case 2:
    case 4:
    case 5:
    case code_interrupted:
      return x.code;
    default:
      return code_rank_failed;
  }
}

void print_cause(const process_group::result& x, const std::string& log_dir) {
  if (!x.cause || x.told_by_rank_0)
    return;
  auto line = fmt::format("smp: {}", x.cause.describe());
  if (!x.last_words.empty())
    line += fmt::format(": {}", x.last_words);
  if (!log_dir.empty() && x.cause.rank != no_rank)
    line += fmt::format("; its output: {}/log-{}.txt", log_dir,
                        x.cause.rank.value);
  print_stderr("{}\n", line);
}

/// For later reading: what was stalled, and who waits for whom.
void write_stall(const stall_report& x, const std::string& log_dir) {
  nlohmann::json silent = nlohmann::json::array();
  for (auto rank : x.silent)
    silent.push_back(rank.value);
  nlohmann::json result{{"deadlock", x.deadlock},
                        {"ends", x.ends},
                        {"text", x.text},
                        {"waits", x.all},
                        {"silent", std::move(silent)}};
  if (x.culprit != no_rank)
    result["culprit"] = x.culprit.value;
  std::ofstream{log_dir + "/stall.json"} << result.dump(2) << '\n';
}

/// Rank 0 tells it on the console, if it can.
bool tells_stalls(const stall_report& x) {
  return x.silent.empty() || x.silent.front() != rank_id{0};
}

} // namespace

int launch(const launch_options& x) {
  if (x.ranks == 0)
    throw error{error_code::config, "the number of ranks must be at least 1"};
  check_limits(x.ranks);
  auto begin = std::time(nullptr);
  auto run_id = make_run_id();
  auto secret = run_secret::make();
  auto handed_over = secret_descriptor(secret);
  process_group::options group_options;
  group_options.command = x.command;
  if (x.command.empty()) {
    group_options.command = own_command();
    group_options.program = "/proc/self/exe";
  }
  group_options.size = x.ranks;
  group_options.log_dir = x.log_dir;
  group_options.verdict = x.verdict;
  group_options.inherited = {handed_over.get()};
  group_options.grace = x.grace;
  group_options.interrupt_grace = x.interrupt_grace;
  supervisor_host* reporter = nullptr;
  group_options.on_failure = [&](const failure& cause) {
    reporter->report_down(cause);
  };
  process_group group{std::move(group_options)};
  actor_host actors;
  supervisor_host::options supervision;
  supervision.world_size = x.ranks;
  supervision.run_id = run_id;
  supervision.secret = secret;
  supervision.join_limit = x.join_limit;
  supervision.on_rank_down = [&](const failure& cause) { group.report(cause); };
  supervision.stalls = x.stalls;
  supervision.on_stall = [&](const stall_report& y) {
    if (!x.log_dir.empty())
      write_stall(y, x.log_dir);
    if (y.ends)
      group.end({error_code::stalled, no_rank, {}, y.text}, code_stalled);
    else if (!tells_stalls(y))
      print_stderr("smp: {}\n", y.text);
  };
  supervisor_host supervisor{actors, supervision};
  reporter = &supervisor;
  group.start([&](uint64_t rank) {
    return variables_of(rank, x, run_id, handed_over.get(), supervisor.port());
  });
  auto result = group.run();
  if (result.cause || result.interrupted)
    remove_dead_segments(shared_memory_folder(), begin);
  if (!x.log_dir.empty())
    for (auto pid : group.pids())
      remove_leftovers(x.log_dir, pid);
  print_cause(result, x.log_dir);
  return exit_code(result);
}

} // namespace smp
