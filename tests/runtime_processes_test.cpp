// ctest: timeout=600 label=multiprocess
#include "tests/support/catch.hpp"

#include "runtime/environment.hpp"
#include "runtime/launcher.hpp"
#include "tests/support/scratch_dir.hpp"
#include "tests/support/torch_equality.hpp"

#include <fmt/format.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

// R35 to R37 over UCX: this program starts itself as the ranks of a run.

using namespace smp;

namespace {

constexpr double dropouts[] = {0.0, 0.2};
constexpr uint64_t microbatch_counts[] = {1, 3, 8};

std::string file_of(const std::string& dir, uint64_t m, double dropout) {
  return fmt::format("{}/{}-{}.safetensors", dir, m, dropout);
}

/// @returns the program's own path with one hidden test case as argument
std::vector<std::string> this_program(const std::string& test) {
  return {std::filesystem::read_symlink("/proc/self/exe"), test};
}

std::string tail_of(const std::filesystem::path& file) {
  std::ifstream in{file};
  std::string text{std::istreambuf_iterator<char>{in}, {}};
  return text.substr(text.size() > 2000 ? text.size() - 2000 : 0);
}

/// Compares what the ranks left in `dir` with plain LibTorch.
void check_files(const std::string& dir) {
  for (auto m : microbatch_counts)
    for (auto dropout : dropouts) {
      INFO("microbatches " << m << " dropout " << dropout);
      auto steps = test::load(file_of(dir, m, dropout));
      CHECK(test::differences(steps, 1, m, dropout)
            == std::vector<std::string>{});
    }
}

} // namespace

TEST_CASE("rank of an equality run", "[.rank]") {
  session_config config;
  config.pipeline_parallel_degree = std::stoul(std::getenv("TEST_PP"));
  config.pipeline = std::getenv("TEST_PIPELINE");
  config.threads = 1;
  session s{config};
  for (auto m : microbatch_counts)
    for (auto dropout : dropouts) {
      auto steps = test::record_steps(s, m, dropout);
      if (s.pp_rank() == 0)
        test::save(file_of(std::getenv("TEST_DIR"), m, dropout), steps);
    }
}

TEST_CASE("processes over UCX give the numbers of one process",
          "[runtime][equality]") {
  auto pp = GENERATE(2u, 4u);
  auto pipeline = GENERATE(as<std::string>{}, "simple", "interleaved");
  DYNAMIC_SECTION(fmt::format("pp {} {}", pp, pipeline)) {
    test::scratch_dir dir;
    launch_options x;
    x.command = this_program("rank of an equality run");
    x.ranks = pp;
    x.log_dir = dir.path;
    x.environment = {{"TEST_DIR", dir.path},
                     {"TEST_PP", std::to_string(pp)},
                     {"TEST_PIPELINE", pipeline}};
    auto code = launch(x);
    INFO(tail_of(dir.path / "log-0.txt") << tail_of(dir.path / "log-1.txt"));
    REQUIRE(code == 0);
    check_files(dir.path);
  }
}

TEST_CASE("ranks that mpirun starts find each other", "[runtime][mpirun]") {
  test::scratch_dir dir;
  auto command = fmt::format(
    "TEST_DIR={0} TEST_PP=2 TEST_PIPELINE=interleaved timeout 120 mpirun "
    "--allow-run-as-root --oversubscribe -n 2 {1} 'rank of an equality run' "
    "> {0}/log-0.txt 2>&1",
    dir.path.string(), this_program("").front());
  auto code = std::system(command.c_str());
  INFO(tail_of(dir.path / "log-0.txt"));
  REQUIRE(code == 0);
  check_files(dir.path);
}
