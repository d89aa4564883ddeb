// ctest: label=multiprocess

// What the system refuses a run, as a user meets it.

#include "tests/support/catch.hpp"

#include "tests/support/runs/processes.hpp"
#include "tests/support/runs/train_dir.hpp"

#include <chrono>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <string>
#include <vector>

using Catch::Matchers::ContainsSubstring;
using namespace smp::test;

namespace {

const std::string tiny = tiny_gpt(4, 4, 8, R"([train]
steps = 2
eval_steps = 0
)");

struct limited_run : train_dir {
  limited_run() : train_dir(tiny) {
    // nop
  }

  /// @returns what it writes after shell commands
  std::string after(const std::string& commands, int expected = 0) const {
    return program{{"sh", "-c", after_these(commands)}, path}.finish(expected);
  }

  /// The same as root in namespaces of its own; skips the test of anybody else.
  std::string apart(const std::string& commands, int expected = 0) const {
    return as_root({"unshare", "-m", "-i", "sh", "-c", after_these(commands)},
                   expected);
  }

  std::string as_root(std::vector<std::string> command, int expected) const {
    program run{std::move(command), path};
    auto code = run.join();
    INFO(run.output());
    for (auto text : {"unshare", "mount:", "/proc/sys/kernel/shmmax:"})
      if (run.output().find(text) != std::string::npos)
        SKIP("only root may mount, have a network and set limits");
    REQUIRE(code == expected);
    return run.output();
  }

private:
  static std::string after_these(const std::string& commands) {
    return commands + "; exec " + built_program("smp-train")
           + " tiny.toml --run-dir out \"$@\"";
  }
};

const std::string small_folder = "mount -t tmpfs -o size=16m tmpfs /dev/shm";

/// Room for two of four ranks.
const std::string part_full
  = "mount -t tmpfs -o size=64m tmpfs /dev/shm && "
    "head -c 45000000 /dev/zero > /dev/shm/full";

/// @returns what its UCX has for shared memory, in files or of System V, as it
/// begins; empty: nothing within a minute
std::string shared_memory_of(const program& rank) {
  auto end = std::chrono::steady_clock::now() + std::chrono::seconds{60};
  auto maps = "/proc/" + std::to_string(rank.pid()) + "/maps";
  while (std::chrono::steady_clock::now() < end) {
    auto mapped = content_of(maps);
    for (auto name : {"ucx_shm_posix_", "/SYSV"})
      if (mapped.find(name) != std::string::npos)
        return name;
    let_pass(std::chrono::milliseconds{10});
  }
  return {};
}

/// @returns how often `what` stands there
size_t count_of(const std::string& what, const std::string& text) {
  size_t result = 0;
  for (auto at = text.find(what); at != std::string::npos;
       at = text.find(what, at + 1))
    ++result;
  return result;
}

} // namespace

TEST_CASE_METHOD(limited_run, "A limit that is too low is one line and code 2",
                 "[apps][train]") {
  auto [limit, text] = GENERATE(
    table<std::string, std::string>({{"ulimit -n 12", "ulimit -n"},
                                     {"ulimit -n 24", "ulimit -n"},
                                     {"ulimit -v 500000", "ulimit -v"},
                                     {"ulimit -f 0", "ulimit -f"}}));
  CHECK_THAT(after(limit, 2), ContainsSubstring(text));
}

TEST_CASE_METHOD(limited_run, "Without loopback no rank is waited for",
                 "[apps][train]") {
  auto told = as_root({"unshare", "-n", built_program("smp-train"), "tiny.toml",
                       "--run-dir", "out"},
                      2);
  CHECK_THAT(told, ContainsSubstring("127.0.0.1: ")
                     && ContainsSubstring("ip link set lo up"));
}

TEST_CASE_METHOD(limited_run, "Closed descriptors are none of a run's files",
                 "[apps][train]") {
  // As from cron.
  after("exec <&- >&- 2>&-");
  CHECK_THAT(content_of(path / "out/log-0.txt"),
             ContainsSubstring("done after 2 of 2 steps"));
}

TEST_CASE_METHOD(limited_run, "A full disk ends a run with the reason",
                 "[apps][train]") {
  std::filesystem::create_directories(path / "out");
  auto told = apart(
    "mount -t tmpfs -o size=4k tmpfs out && "
    "head -c 10000 /dev/zero > out/full || true",
    2);
  CHECK_THAT(told, ContainsSubstring("No space left on device"));
}

TEST_CASE_METHOD(limited_run, "So does one that the run itself fills",
                 "[apps][train]") {
  std::filesystem::create_directories(path / "out");
  // Room for some hundred steps.
  auto told = apart(
    "mount -t tmpfs -o size=128k tmpfs out && set -- --train.steps=1000000", 2);
  CHECK_THAT(told,
             ContainsSubstring(" 1/1000000")
               && ContainsSubstring("metrics.jsonl: No space left on device"));
}

TEST_CASE_METHOD(limited_run,
                 "Without room in files the ranks share memory of System V",
                 "[apps][train]") {
  auto told = apart(small_folder);
  CHECK(count_of("/dev/shm has 16 MB", told) == 1);
  CHECK(count_of("share memory of System V instead", told) == 1);
  CHECK(count_of("can connect", told) == 0);
}

TEST_CASE_METHOD(limited_run, "Without any shared memory they talk by tcp",
                 "[apps][train]") {
  auto told = apart(small_folder + " && echo 0 > /proc/sys/kernel/shmmax");
  CHECK(count_of("no shared memory between ranks", told) == 1);
  CHECK(count_of("/dev/shm has 16 MB", told) == 1);
  CHECK(count_of("where every user of this machine can connect", told) == 1);
}

// Each rank takes a part of what there is: the first ones would find room.
TEST_CASE_METHOD(limited_run, "Where some of the ranks fit, none takes files",
                 "[apps][train]") {
  auto told = apart(part_full + "; set -- --ranks 4");
  CHECK_THAT(told, ContainsSubstring("/dev/shm has 64 MB")
                     && ContainsSubstring("4 ranks of this machine"));
}

// Where no launcher of ours decides for all, the last one finds less.
TEST_CASE_METHOD(limited_run, "So it is for ranks that begin one by one",
                 "[apps][train]") {
  program holder{{"unshare", "-m", "sh", "-c",
                  part_full + " && echo ready && exec tail -f /dev/null"},
                 path};
  if (!holder.wait_for("ready"))
    SKIP("only root may mount: " << holder.output());
  std::vector<std::unique_ptr<program>> ranks;
  for (int i = 0; i < 4; ++i) {
    std::vector<std::string> command{"nsenter",
                                     "-m",
                                     "-t",
                                     std::to_string(holder.pid()),
                                     "sh",
                                     "-c",
                                     "cd " + path.string() + " && exec "
                                       + built_program("smp-train")
                                       + " tiny.toml --ranks 4 --run-dir out"};
    ranks.push_back(
      std::make_unique<program>(command, path,
                                std::map<std::string, std::string>{
                                  {"RANK", std::to_string(i)},
                                  {"WORLD_SIZE", "4"},
                                  {"TORCHELASTIC_RUN_ID", path.filename()},
                                  {"SMP_RENDEZVOUS_DIR", path}}));
    CHECK(shared_memory_of(*ranks.back()) == "/SYSV");
  }
  for (auto& x : ranks)
    x->finish();
  CHECK_THAT(ranks[0]->output(), ContainsSubstring("memory of System V"));
}

TEST_CASE_METHOD(limited_run, "What a killed run had half written goes",
                 "[apps][train]") {
  std::filesystem::create_directories(path / "out");
  auto left = path / "out/model.safetensors.partial-12345-0";
  std::ofstream{left} << "half";
  after("true");
  CHECK_FALSE(std::filesystem::exists(left));
}
