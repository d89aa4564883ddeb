// ctest: label=multiprocess

// The scripts of docs/machines.md, with the names filled in.

#include "tests/support/catch.hpp"

#include "tests/support/markdown.hpp"
#include "tests/support/runs/machine_runs.hpp"

#include <cstdlib>
#include <filesystem>
#include <map>
#include <sstream>
#include <string>

using Catch::Matchers::ContainsSubstring;
using namespace smp::test;

namespace {

std::string replaced(std::string text, const std::string& what,
                     const std::string& by) {
  auto at = text.find(what);
  REQUIRE(at != std::string::npos);
  for (; at != std::string::npos; at = text.find(what, at + by.size()))
    text.replace(at, what.size(), by);
  return text;
}

/// @returns the block after `begin` whose lines are `indent` deep
std::string indented_block(const std::string& text, const std::string& begin,
                           size_t indent) {
  auto at = text.find(begin);
  REQUIRE(at != std::string::npos);
  std::istringstream in{text.substr(at + begin.size())};
  std::string result;
  const std::string blanks(indent, ' ');
  for (std::string line; std::getline(in, line) && line.starts_with(blanks);)
    result += line.substr(indent) + '\n';
  return result;
}

struct documented : machines_dir {
  documented() {
    // Where it is run is not where it stands.
    write("tiny.toml", replaced(read("tiny.toml"), "text.txt",
                                (path / "text.txt").string()));
    page = content_of(source_file("docs/machines.md"));
    std::filesystem::create_directory(path / "bin");
  }

  void write_program(const std::string& name, const std::string& text) const {
    std::filesystem::permissions(write("bin/" + name, text),
                                 std::filesystem::perms::owner_all);
  }

  std::string search_path() const {
    return (path / "bin").string() + ':' + std::getenv("SMP_BIN_DIR") + ':'
           + std::getenv("PATH");
  }

  std::string page;
};

} // namespace

TEST_CASE_METHOD(documented, "the Kubernetes job of the documentation runs",
                 "[apps][machines][docs]") {
  auto manifest = code_block(page, "### Kubernetes", "yaml");
  auto script = indented_block(manifest, "- |\n", 10);
  CHECK_THAT(script, ContainsSubstring("WORLD_SIZE=2"));
  script = replaced(script, "CONFIG", (path / "tiny.toml").string());
  // Names of that network, and what the pod sees of its volumes.
  script = replaced(script, "smp-0.smp", on.name(0));
  for (size_t i : {0, 1}) {
    auto pod = path / ("pod-" + std::to_string(i));
    std::filesystem::create_directory(pod);
    auto mine = replaced(script, "/tmp/keys", (pod / "own").string());
    mine = replaced(mine, " /keys/", ' ' + (path / "keys").string() + '/');
    running.emplace_back(new program(on.start(
      i, {"bash", "-c", mine}, pod,
      {{"JOB_COMPLETION_INDEX", std::to_string(i)}, {"PATH", search_path()}})));
  }
  CHECK(join_all() == std::vector{0, 0});
  INFO(output(0) << output(1));
  CHECK_THAT(output(0), ContainsSubstring("done after 4 of 4 steps"));
}

TEST_CASE_METHOD(documented, "the Slurm batch file of the documentation runs",
                 "[apps][machines][docs]") {
  auto batch = code_block(page, "As a batch file:", "");
  CHECK_THAT(batch, ContainsSubstring("#SBATCH --nodes=2\n")
                      && ContainsSubstring("#SBATCH --ntasks-per-node=2\n"));
  batch = replaced(replaced(batch, "CONFIG", "tiny.toml"), "KEYS", "keys");
  write_program("ssh", on.stand_in_for_ssh());
  write_program("scontrol", "#!/bin/sh\necho \"$3\" | tr , '\\n'\n");
  write_program("srun", R"(#!/bin/bash
while [ "${1#--}" != "$1" ]; do echo "srun got $1"; shift; done
rank=0
for node in 0 1; do
  host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" |
    sed -n $((node + 1))p)
  for local in 0 1; do
    ssh "$host" env SLURM_PROCID=$rank SLURM_STEP_NUM_TASKS=$SLURM_NTASKS \
      SLURM_LOCALID=$local SLURM_NODEID=$node SLURM_STEP_ID=0 \
      "SLURM_STEP_TASKS_PER_NODE='2(x2)'" "$@" &
    running="$running $!"
    rank=$((rank + 1))
  done
done
code=0
for x in $running; do wait $x || code=$?; done
exit $code
)");
  auto file = write("batch.sh", batch);
  auto run = on.start(0, {"bash", file}, path,
                      {{"HOME", path},
                       {"PATH", search_path()},
                       {"SLURM_JOB_ID", "42"},
                       {"SLURM_NTASKS", "4"},
                       {"SLURM_CPUS_PER_TASK", "8"},
                       {"SLURM_PROCID", "0"}, // of the script itself
                       {"SLURM_LOCALID", "0"},
                       {"SLURM_NODEID", "0"},
                       {"SLURM_JOB_NODELIST", "ma,mb"}});
  CHECK(run.join() == 0);
  INFO(run.output());
  CHECK_THAT(run.output(), ContainsSubstring("done after 4 of 4 steps"));
  // It does not know it from the batch file.
  CHECK_THAT(run.output(), ContainsSubstring("srun got --cpus-per-task=8\n"));
  CHECK_THAT(read("runs/42/log-3.txt"),
             ContainsSubstring("local rank 1 of 2 on mb"));
}
