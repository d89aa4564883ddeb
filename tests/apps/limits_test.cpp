// ctest: timeout=300 label=multiprocess

// What the system refuses a run, as a user meets it.

#include "tests/support/catch.hpp"

#include "tests/support/processes.hpp"
#include "tests/support/train_dir.hpp"

#include <chrono>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <string>
#include <system_error>
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

  /// Runs it after shell commands; as root in a mount namespace of its own.
  program after(const std::string& commands, bool apart = false) const {
    std::vector<std::string> command{"sh", "-c",
                                     commands + "; exec "
                                       + built_program("smp-train")
                                       + " tiny.toml --run-dir out \"$@\""};
    if (apart)
      command.insert(command.begin(), {"unshare", "-m"});
    return program{std::move(command), path};
  }
};

/// Room for two of four ranks.
const std::string part_full
  = "mount -t tmpfs -o size=64m tmpfs /dev/shm && "
    "head -c 45000000 /dev/zero > /dev/shm/full";

bool may_not_mount(const program& x) {
  return x.output().find("unshare") != std::string::npos
         || x.output().find("mount:") != std::string::npos;
}

/// @returns whether its UCX has shared memory, or listens beside others
bool has_begun(const program& rank, size_t ports) {
  auto end = std::chrono::steady_clock::now() + std::chrono::seconds{60};
  auto files = std::filesystem::path{"/proc"} / std::to_string(rank.pid())
               / "fd";
  while (std::chrono::steady_clock::now() < end) {
    std::error_code ignored;
    for (auto& x : std::filesystem::directory_iterator{files, ignored})
      if (std::filesystem::read_symlink(x.path(), ignored)
            .string()
            .find("ucx_shm_posix_")
          != std::string::npos)
        return true;
    if (listening_ports_of(rank.pid()).size() >= ports)
      return true;
    let_pass(std::chrono::milliseconds{10});
  }
  return false;
}

} // namespace

TEST_CASE_METHOD(limited_run, "A limit that is too low is one line and code 2",
                 "[apps][train]") {
  auto [limit, text] = GENERATE(
    table<std::string, std::string>({{"ulimit -n 12", "ulimit -n"},
                                     {"ulimit -n 24", "ulimit -n"},
                                     {"ulimit -v 500000", "ulimit -v"},
                                     {"ulimit -f 0", "File too large"}}));
  auto run = after(limit);
  auto code = run.join();
  INFO(run.output());
  CHECK(code == 2);
  CHECK_THAT(run.output(), ContainsSubstring(text));
}

TEST_CASE_METHOD(limited_run, "A full disk ends a run with the reason",
                 "[apps][train]") {
  std::filesystem::create_directories(path / "out");
  auto run = after(
    "mount -t tmpfs -o size=4k tmpfs out && "
    "head -c 10000 /dev/zero > out/full || true",
    true);
  auto code = run.join();
  INFO(run.output());
  if (may_not_mount(run))
    SKIP("only root may mount");
  CHECK(code == 2);
  CHECK_THAT(run.output(), ContainsSubstring("No space left on device"));
}

TEST_CASE_METHOD(limited_run, "So does one that the run itself fills",
                 "[apps][train]") {
  std::filesystem::create_directories(path / "out");
  // Room for some hundred steps.
  auto run = after(
    "mount -t tmpfs -o size=128k tmpfs out && set -- --train.steps=1000000",
    true);
  auto code = run.join();
  INFO(run.output());
  if (may_not_mount(run))
    SKIP("only root may mount");
  CHECK(code == 2);
  CHECK_THAT(run.output(),
             ContainsSubstring(" 1/1000000")
               && ContainsSubstring("metrics.jsonl: No space left on device"));
}

TEST_CASE_METHOD(limited_run,
                 "Without room for shared memory the ranks talk by tcp",
                 "[apps][train]") {
  auto run = after("mount -t tmpfs -o size=16m tmpfs /dev/shm", true);
  auto code = run.join();
  INFO(run.output());
  if (may_not_mount(run))
    SKIP("only root may mount");
  CHECK(code == 0);
  auto& told = run.output();
  auto first = told.find("no shared memory between ranks");
  REQUIRE(first != std::string::npos);
  CHECK_THAT(told, ContainsSubstring("/dev/shm has 16 MB"));
  CHECK(told.find("no shared memory", first + 1) == std::string::npos);
  // Once, too.
  const std::string open = "where every user of this machine can connect";
  auto warned = told.find(open);
  REQUIRE(warned != std::string::npos);
  CHECK(told.find(open, warned + 1) == std::string::npos);
}

// Each rank takes a part of what there is: the first ones would find room.
TEST_CASE_METHOD(limited_run, "Where some of the ranks fit, none takes memory",
                 "[apps][train]") {
  auto run = after(part_full + "; set -- --ranks 4", true);
  auto code = run.join();
  INFO(run.output());
  if (may_not_mount(run))
    SKIP("only root may mount");
  CHECK(code == 0);
  CHECK_THAT(run.output(), ContainsSubstring("/dev/shm has 64 MB")
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
    // Rank 0 has the SUPERVISOR's port, too.
    REQUIRE(has_begun(*ranks.back(), i == 0 ? 2 : 1));
  }
  for (auto& x : ranks) {
    auto code = x->join();
    INFO(x->output());
    CHECK(code == 0);
  }
  CHECK_THAT(ranks[0]->output(), ContainsSubstring("no shared memory between"));
}

TEST_CASE_METHOD(limited_run, "What a killed run had half written goes",
                 "[apps][train]") {
  std::filesystem::create_directories(path / "out");
  auto left = path / "out/model.safetensors.partial-12345-0";
  std::ofstream{left} << "half";
  CHECK(after("true").join() == 0);
  CHECK_FALSE(std::filesystem::exists(left));
}
