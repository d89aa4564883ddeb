#pragma once

// Runs of four ranks over several "machines".

#include "tests/support/catch.hpp"

#include "tests/support/runs/machines.hpp"
#include "tests/support/runs/recorded_runs.hpp"

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace smp::test {

inline const std::string four_ranks = tiny_gpt(4, 4, 8, R"([optimizer]
type = "sgd"
lr = 1e-2

[transport]
trusted_network = true
keys = "keys"

[train]
steps = 4
log_interval = 1
eval_steps = 0
)");

/// Four ranks on machines, started as mpirun or Kubernetes would.
struct machines_dir : recorded_runs {
  explicit machines_dir(size_t count = 2, bool ipv6_only = false)
    : recorded_runs(four_ranks),
      ranks_per_machine(4 / count),
      on(count, ipv6_only) {
    auto keys = start({"keys", "keys"});
    REQUIRE(keys.join() == 0);
  }

  void start_rank(size_t rank, const std::string& master,
                  std::vector<std::string> arguments) {
    auto environment = more_environment;
    environment.insert(
      {{"RANK", std::to_string(rank)},
       {"LOCAL_RANK", std::to_string(rank % ranks_per_machine)},
       {"WORLD_SIZE", "4"},
       {"MASTER_ADDR", master},
       {"MASTER_PORT", "29400"}});
    arguments.insert(arguments.begin(), built_program("smp-train"));
    arguments.insert(arguments.end(), {"--ranks", "4", "--run-dir", "run"});
    running.emplace_back(new program(
      on.start(rank / ranks_per_machine, arguments, path, environment)));
  }

  /// @param master what leads to machine 0
  void start_ranks(const std::string& master,
                   const std::vector<std::string>& arguments) {
    for (size_t i = 0; i < 4; ++i)
      start_rank(i, master, arguments);
  }

  std::vector<int> join_all() {
    std::vector<int> result;
    for (auto& x : running)
      result.push_back(x->join());
    return result;
  }

  std::string output(size_t rank) {
    return running.at(rank)->output();
  }

  /// Compares `steps` steps with one process, and returns when they run.
  void start_comparison(int steps, std::vector<std::string> more = {}) {
    more.insert(more.begin(),
                {"verify", "tiny.toml", "--steps", std::to_string(steps)});
    start_ranks(on.name(0), more);
    await_steps();
  }

  /// Waits until the ranks, or launchers, that were started train.
  void await_steps() {
    INFO(output(0));
    REQUIRE(running[0]->wait_for(" %\n")); // at the end of a step's line
  }

  void check_equal() {
    auto codes = join_all();
    INFO(output(0));
    CHECK(codes == std::vector{0, 0, 0, 0});
    CHECK_THAT(output(0), Catch::Matchers::ContainsSubstring("equal: "));
  }

  size_t ranks_per_machine;
  machines on;
  std::map<std::string, std::string> more_environment;
  std::vector<std::unique_ptr<program>> running;
};

/// Two launchers, one on each machine.
struct launchers : machines_dir {
  /// What a user types on machine `node`, or what srun starts there.
  std::vector<std::string> command(const std::string& node,
                                   std::vector<std::string> more) const {
    std::vector<std::string> result{built_program("smp-train")};
    result.insert(result.end(), more.begin(), more.end());
    more = {"--ranks", "4", "--nodes", "2"};
    if (!by_srun)
      more.insert(more.end(),
                  {"--node-rank", node, "--master", on.name(0) + ":29400"});
    result.insert(result.end(), more.begin(), more.end());
    return result;
  }

  /// srun --ntasks-per-node=1 of Slurm 22.05
  std::map<std::string, std::string>
  variables_of_srun(const std::string& node) const {
    return {{"SLURM_JOB_ID", "7"},
            {"SLURM_STEP_ID", "0"},
            {"SLURM_NTASKS", "2"},
            {"SLURM_STEP_NUM_TASKS", "2"},
            {"SLURM_STEP_TASKS_PER_NODE", "1(x2)"},
            {"SLURM_PROCID", node},
            {"SLURM_NODEID", node},
            {"SLURM_LOCALID", "0"},
            {"MASTER_ADDR", on.name(0)},
            {"MASTER_PORT", "29400"}};
  }

  void start_launchers(std::vector<std::string> more) {
    // The second one waits for the first.
    for (size_t i : {1, 0})
      running.push_back(start_launcher(i, more));
    std::swap(running[0], running[1]);
  }

  std::unique_ptr<program>
  start_launcher(size_t node, const std::vector<std::string>& more) {
    auto number = std::to_string(node);
    return std::unique_ptr<program>{
      new program(on.start(node, command(number, more), path,
                           by_srun ? variables_of_srun(number)
                                   : std::map<std::string, std::string>{}))};
  }

  bool by_srun = false;
};

} // namespace smp::test
