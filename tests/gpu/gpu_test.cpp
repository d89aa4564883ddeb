#include "tests/support/catch.hpp"

#include "runtime/device/cuda_driver.hpp"
#include "tests/support/runs/train_dir.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

// What `./dev gpu-test` runs: under 8 minutes on one GPU.

using namespace smp::test;
using namespace std::chrono_literals;
using Catch::Matchers::ContainsSubstring;

namespace {

using variables = std::map<std::string, std::string>;

/// "cuda", or what is to be tried in its place.
std::string device() {
  const auto* x = std::getenv("SMP_GPU_TEST");
  return x != nullptr ? x : "";
}

void need_gpu() {
  if (!device().empty() && device() != "cuda")
    return;
  ::unsetenv("SMP_CUDA");
  static const auto problem = smp::ask_cuda_driver().problem;
  if (!problem.empty())
    SKIP(problem);
  if (device().empty())
    SKIP("./dev gpu-test runs this");
}

template <class... Ts>
void row(fmt::format_string<Ts...> format, Ts&&... xs) {
  fmt::print("  {}\n", fmt::format(format, std::forward<Ts>(xs)...));
  std::fflush(stdout);
}

variables on_device(variables more = {}) {
  more["SMP_CUDA"] = "";
  if (device() == "sim")
    more["LD_PRELOAD"] = std::filesystem::canonical(
      built_program("../lib/smp_simulated_device.so"));
  return more;
}

std::string use(const std::string& where) {
  return "--smp.device=" + where;
}

std::vector<std::string> quickstart(std::vector<std::string> more) {
  std::vector<std::string> result{
    source_file("config/quickstart.toml"), "--train.log_interval=1",
    "--train.sample=0", "--train.eval_steps=0", "--train.save_model=false"};
  result.insert(result.end(), more.begin(), more.end());
  return result;
}

/// Runs a program within a limit.
/// @returns what it wrote
std::string finish(program&& x, std::chrono::seconds limit, int expected = 0) {
  auto begin = std::chrono::steady_clock::now();
  auto code = x.join(limit);
  std::chrono::duration<double> spent = std::chrono::steady_clock::now()
                                        - begin;
  INFO(x.output());
  INFO("after " << spent.count() << " s");
  REQUIRE(code == expected);
  return x.output();
}

std::vector<double> losses(const train_dir& dir, const std::string& run) {
  std::vector<double> result;
  for (auto& x : dir.metrics(run))
    result.push_back(x["loss"].get<double>());
  return result;
}

/// @returns the largest difference, relative
double difference(const std::vector<double>& xs,
                  const std::vector<double>& ys) {
  REQUIRE(xs.size() == ys.size());
  REQUIRE(!xs.empty());
  double result = 0;
  for (size_t i = 0; i < xs.size(); ++i)
    result = std::max(result, std::abs(xs[i] - ys[i]) / std::abs(ys[i]));
  return result;
}

/// @returns the losses of the quickstart
std::vector<double> train(const train_dir& dir, const std::string& run,
                          std::vector<std::string> more, variables environment,
                          std::chrono::seconds limit = 60s) {
  more.push_back("--run-dir=" + run);
  finish(dir.start(quickstart(std::move(more)), std::move(environment)), limit);
  return losses(dir, run);
}

/// Prints lines of a benchmark, those that begin with one of `kept`.
void show(const std::string& name, std::vector<std::string> arguments,
          std::chrono::seconds limit, const std::vector<std::string>& kept) {
  arguments.insert(arguments.begin(), built_program("bench_" + name));
  arguments.push_back("--device=" + device());
  std::istringstream lines{
    finish(program{std::move(arguments), ".", on_device()}, limit)};
  for (std::string line; std::getline(lines, line);) {
    auto begin = std::min(line.find_first_not_of(' '), line.size());
    if (std::ranges::any_of(
          kept, [&](auto& x) { return line.compare(begin, x.size(), x) == 0; }))
      row("{}", line.substr(begin));
  }
}

} // namespace

TEST_CASE("There are a driver and GPUs", "[gpu]") {
  if (device().empty())
    need_gpu();
  if (device() != "cuda")
    return row("device {}", device());
  auto driver = smp::ask_cuda_driver();
  INFO(driver.problem);
  REQUIRE(driver.problem.empty());
  row("driver for CUDA {}.{}", driver.version / 1000,
      driver.version % 1000 / 10);
  for (auto& gpu : driver.gpus)
    row("{}, {:.1f} GB", gpu.name, static_cast<double>(gpu.memory) * 1e-9);
}

TEST_CASE("One rank on a GPU has the losses of the CPU", "[gpu]") {
  need_gpu();
  train_dir dir{""};
  const std::vector<std::string> one{"--smp.pipeline_parallel_degree=1",
                                     "--train.steps=10"};
  auto with = [&](const std::string& x) {
    auto result = one;
    result.push_back(use(x));
    return result;
  };
  auto cpu = train(dir, "cpu", with("cpu"), {}, 120s);
  auto gpu = train(dir, "gpu", with(device()), on_device());
  auto found = difference(gpu, cpu);
  row("largest difference of 10 losses: {:.1e}", found);
  CHECK(found < 1e-3);
}

TEST_CASE("Two ranks on a GPU have the numbers of one process there", "[gpu]") {
  need_gpu();
  train_dir dir{""};
  auto text = finish(
    dir.start({"verify", source_file("config/quickstart.toml"), use(device()),
               "--model.dropout=0.1", "--modes", "fast,static+fast"},
              on_device()),
    150s);
  row("{}", text.substr(std::min(text.rfind("modes:"), text.size() - 1)));
}

TEST_CASE("A checkpoint of the CPU goes on on a GPU, and back", "[gpu]") {
  need_gpu();
  train_dir dir{""};
  auto run = [&](const std::string& name, const std::string& where, int steps) {
    return train(dir, name,
                 {use(where), fmt::format("--train.steps={}", steps),
                  "--checkpoint.dir=" + (dir.path / "saved").string()},
                 where == "cpu" ? variables{} : on_device());
  };
  auto parts = run("first", "cpu", 2);
  for (auto x : run("second", device(), 4))
    parts.push_back(x);
  for (auto x : run("third", "cpu", 6))
    parts.push_back(x);
  auto whole = train(dir, "whole", {use("cpu"), "--train.steps=6"}, {});
  auto found = difference(parts, whole);
  row("largest difference of 6 losses: {:.1e}", found);
  CHECK(found < 1e-3);
}

TEST_CASE("bfloat16 trains on a GPU", "[gpu]") {
  need_gpu();
  train_dir dir{""};
  auto full = train(dir, "float32", {use(device()), "--train.steps=10"},
                    on_device());
  auto half = train(
    dir, "bfloat16",
    {use(device()), "--train.steps=10", "--train.dtype=bfloat16"}, on_device());
  auto found = difference(half, full);
  row("largest difference of 10 losses from float32: {:.1e}", found);
  CHECK(found < 0.05);
}

TEST_CASE("A call of a module on another rank takes less than a millisecond",
          "[gpu]") {
  need_gpu();
  show("call", {"--part=ad", "--calls=500"}, 60s,
       {"us ", "remote", "local", "from device", "a kernel"});
}

TEST_CASE("Two ranks on GPUs are near to an ideal pipeline", "[gpu]") {
  need_gpu();
  for (auto width :
       device() == "cuda" ? std::vector{1024, 2048} : std::vector{64})
    show("pipeline",
         {fmt::format("--width={}", width), "--rounds=1", "--steps=10"}, 90s,
         {"GPT of width", "step time", "pipeline, ", "one process, 1",
          "pipeline / ideal (", "bubble ratio"});
}

TEST_CASE("A rank that is killed while its GPU works ends the run", "[gpu]") {
  need_gpu();
  train_dir dir{endless_gpt()};
  auto run = dir.start({"tiny.toml", use(device()), "--run-dir=run"},
                       on_device());
  REQUIRE(run.wait_for("3/1000000", 60s));
  auto victim = dir.process_of(1);
  auto begin = std::chrono::steady_clock::now();
  ::kill(victim, SIGKILL);
  auto text = finish(std::move(run), 60s, 3);
  std::chrono::duration<double> spent = std::chrono::steady_clock::now()
                                        - begin;
  row("all ended after {:.1f} s", spent.count());
  CHECK_THAT(text, ContainsSubstring("rank 1"));
}

TEST_CASE("A rank without memory on its GPU says what it needs", "[gpu]") {
  need_gpu();
  train_dir dir{""};
  auto big = device() == "cuda";
  auto environment = on_device();
  if (!big)
    environment["SMP_SIM_CAPACITY"] = "48";
  auto text = finish(
    dir.start(quickstart({use(device()), "--train.steps=1",
                          fmt::format("--data.batch_size={}", big ? 16384 : 32),
                          "--smp.microbatches=1", "--smp.trace_device=none",
                          "--data.sequence_length=1024"}),
              environment),
    90s, 3);
  CHECK_THAT(text, ContainsSubstring("out of memory")
                     && ContainsSubstring("this rank needs"));
  row("{}", text.substr(std::min(text.rfind("smp-train: "), text.size() - 1)));
}
