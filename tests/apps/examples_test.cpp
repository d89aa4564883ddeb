// ctest: seconds=21 label=multiprocess

#include "tests/support/catch.hpp"

#include "tests/support/markdown.hpp"
#include "tests/support/runs/printed_losses.hpp"
#include "tests/support/runs/program.hpp"
#include "tests/support/scratch_dir.hpp"

#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <vector>

using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::EndsWith;
using Catch::Matchers::StartsWith;
using namespace smp::test;

TEST_CASE("README shows the example as it is", "[apps][examples]") {
  CHECK(code_block(content_of(source_file("README.md")), "Your own model")
        == content_of(source_file("examples/train_own_model.cpp")));
}

TEST_CASE("CONTRIBUTING shows the pattern as it is", "[apps][examples]") {
  CHECK(code_block(content_of(source_file("CONTRIBUTING.md")), "The pattern")
        == content_of(source_file("tests/actors/protocol/pattern_test.cpp")));
}

TEST_CASE_METHOD(scratch_dir, "The example trains on two ranks",
                 "[apps][examples]") {
  program run{{built_program("train_own_model"), "--ranks", "2"}, path};
  CHECK(run.join() == 0);
  INFO(run.output());
  CHECK(learned(run.output()));
  CHECK_THAT(run.output(), ContainsSubstring("modules over 2 devices"));
  CHECK_THAT(run.output(), !ContainsSubstring("warning"));
  // What the console showed lies in the directory that it named.
  const std::string before = "smp: run dir ";
  CHECK_THAT(run.output(), StartsWith(before + "runs/"));
  auto name = run.output().substr(0, run.output().find('\n'));
  CHECK_THAT(name, EndsWith("-train_own_model"));
  auto dir = path / name.substr(before.size());
  CHECK(losses_in(content_of(dir / "log-0.txt")) == losses_in(run.output()));
  CHECK(std::filesystem::exists(dir / "log-1.txt"));
}

TEST_CASE_METHOD(scratch_dir, "A second run leaves the first one's files alone",
                 "[apps][examples]") {
  const std::vector<std::string> command{built_program("train_own_model"),
                                         "--ranks", "2", "--run-dir=out"};
  program first{command, path};
  CHECK(first.join() == 0);
  auto before = content_of(path / "out/log-0.txt");
  program second{command, path};
  CHECK(second.join() == 2);
  CHECK(second.output()
        == "error: --run-dir out holds a run already (out/log-0.txt); give "
           "another directory or remove this one, or leave --run-dir out for a "
           "new one below runs/\n");
  CHECK(content_of(path / "out/log-0.txt") == before);
  CHECK_FALSE(std::filesystem::exists(path / "runs"));
}

namespace {

/// Runs an example that tensor-parallel ranks share on 1, 2 and 4 of them.
/// @param print of the partition, by the number of ranks
void check_shared_example(
  const std::string& name,
  const std::function<std::string(const std::string&)>& print) {
  auto losses = [&](const std::string& ranks) {
    scratch_dir dir;
    program run{{built_program(name), "--ranks", ranks}, dir.path};
    CHECK(run.join() == 0);
    INFO(run.output());
    CHECK(learned(run.output()));
    // One rank has nothing to show but what is on the console.
    CHECK(std::filesystem::exists(dir.path / "runs") == (ranks != "1"));
    if (ranks != "1")
      CHECK_THAT(run.output(), ContainsSubstring(print(ranks)));
    return losses_in(run.output());
  };
  auto one = losses("1");
  for (std::string ranks : {"2", "4"}) {
    CAPTURE(ranks);
    auto x = losses(ranks);
    REQUIRE(x.size() == one.size());
    for (size_t i = 0; i < x.size(); ++i)
      CHECK(x[i] == Catch::Approx(one[i]).epsilon(1e-3).margin(2e-3));
  }
}

} // namespace

TEST_CASE("experts that ranks spread over them learn what one process learns",
          "[apps][examples]") {
  check_shared_example("mixture_of_experts", [](auto& ranks) {
    return "cut along axis 0 by " + ranks + " ranks: first.wi";
  });
}

TEST_CASE("layers that ranks share learn what one process learns",
          "[apps][examples]") {
  check_shared_example("shared_transformer", [](auto& ranks) {
    return "TransformerLayer shared by " + ranks
           + " ranks for memory: transformer.seq_layers.0, "
             "transformer.seq_layers.1";
  });
}

TEST_CASE_METHOD(scratch_dir, "the example says in one line what is wrong",
                 "[apps][examples]") {
  auto [ranks, line] = GENERATE(table<std::string, std::string>(
    {{"3",
      "error: 3 ranks are not a multiple of smp.pipeline_parallel_degree = 2 "
      "times smp.tensor_parallel_degree = 1\n"},
     {"many", "error: --ranks many: expected a number of ranks, 1 or more\n"},
     {"",
      "error: smp.pipeline_parallel_degree = 2, but this process is the only "
      "rank: start the program with --ranks 2 (smp::init), or by mpirun, srun "
      "or torchrun\n"}}));
  std::vector<std::string> command{built_program("train_own_model")};
  if (!ranks.empty())
    command.insert(command.end(), {"--ranks", ranks});
  program run{command, path};
  CHECK(run.join() == 2);
  auto told = run.output();
  CHECK(std::filesystem::exists(path / "runs") == (ranks == "3"));
  if (ranks == "3")
    told.erase(0, told.find('\n') + 1); // where the logs are
  // Rank 0 says it, or, if another one ended long before it, the launcher.
  const std::string by_launcher = "exited with code 2: ";
  if (auto at = told.find(by_launcher); at != std::string::npos) {
    told = "error: " + told.substr(at + by_launcher.size());
    told = told.substr(0, told.find("; its output: ")) + '\n';
  }
  CHECK(told == line);
}

// A shell that srun or a cluster made is a rank already.
TEST_CASE_METHOD(scratch_dir,
                 "the example says which variables keep it from starting ranks",
                 "[apps][examples]") {
  std::map<std::string, std::string> shell;
  shell["RANK"] = "0";
  shell["WORLD_SIZE"] = "1";
  shell["MASTER_PORT"] = "29500";
  shell["SMP_RENDEZVOUS_DIR"] = path;
  program run{{built_program("train_own_model"), "--ranks", "2"}, path, shell};
  CHECK(run.join() == 2);
  CHECK_THAT(run.output(),
             ContainsSubstring("this process is the only rank: ")
               && ContainsSubstring("to be without one, unset RANK and "
                                    "WORLD_SIZE\n"));
}
