// ctest: timeout=300 label=multiprocess

// What the system refuses a run, as a user meets it.

#include "tests/support/catch.hpp"

#include "tests/support/train_dir.hpp"

#include <string>
#include <vector>

using Catch::Matchers::ContainsSubstring;
using namespace smp::test;

namespace {

const std::string tiny = tiny_gpt(2, 4, 8, R"([train]
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
                                       + " tiny.toml --run-dir out"};
    if (apart)
      command.insert(command.begin(), {"unshare", "-m"});
    return program{std::move(command), path};
  }
};

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
  if (run.output().find("unshare") != std::string::npos
      || run.output().find("mount:") != std::string::npos)
    SKIP("only root may mount");
  CHECK(code == 2);
  CHECK_THAT(run.output(), ContainsSubstring("No space left on device"));
}

TEST_CASE_METHOD(limited_run,
                 "Without room for shared memory the ranks talk by tcp",
                 "[apps][train]") {
  auto run = after("mount -t tmpfs -o size=16m tmpfs /dev/shm", true);
  auto code = run.join();
  INFO(run.output());
  if (run.output().find("unshare") != std::string::npos
      || run.output().find("mount:") != std::string::npos)
    SKIP("only root may mount");
  CHECK(code == 0);
  auto& told = run.output();
  auto first = told.find("no shared memory between ranks");
  REQUIRE(first != std::string::npos);
  CHECK_THAT(told, ContainsSubstring("/dev/shm has 16 MB"));
  CHECK(told.find("no shared memory", first + 1) == std::string::npos);
}

TEST_CASE_METHOD(limited_run, "What a killed run had half written goes",
                 "[apps][train]") {
  std::filesystem::create_directories(path / "out");
  auto left = path / "out/model.safetensors.partial-12345-0";
  std::ofstream{left} << "half";
  CHECK(after("true").join() == 0);
  CHECK_FALSE(std::filesystem::exists(left));
}
