// ctest: timeout=300 label=multiprocess
#include "tests/support/catch.hpp"

#include "runtime/environment.hpp"
#include "runtime/launcher.hpp"
#include "runtime/safetensors.hpp"
#include "runtime/smp.hpp"
#include "tests/support/scratch_dir.hpp"

#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <fmt/format.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include <sys/resource.h>

// A model that no process may hold, on two processes with a limit on memory.

using namespace smp;

namespace nn = torch::nn;

namespace {

/// 16 matrices of 16 MB, as a frozen trunk under one layer that trains.
struct large_impl : nn::Module {
  large_impl() {
    for (int i = 0; i < 16; ++i) {
      trunk->push_back(nn::Linear(nn::LinearOptions(2048, 2048).bias(false)));
      trunk->push_back(nn::Tanh());
    }
    for (auto& x : trunk->parameters())
      x.set_requires_grad(false);
    register_module("trunk", trunk);
    register_module("head", head);
  }

  torch::Tensor forward(torch::Tensor x) {
    return head(trunk->forward(x));
  }

  nn::Sequential trunk;
  submodule<nn::Linear> head{2048, 512};
};
TORCH_MODULE_IMPL(large, large_impl);

/// What /proc says about this process, in bytes.
uint64_t memory(const std::string& field) {
  std::ifstream in{"/proc/self/status"};
  std::string word;
  uint64_t kilobytes = 0;
  while (in >> word)
    if (word == field + ":") {
      in >> kilobytes;
      break;
    }
  return kilobytes * 1024;
}

struct outcome {
  int code = 0;
  std::string log;
  std::map<std::string, torch::Tensor> state;
  uint64_t peak = 0; // bytes, of rank 0
};

/// Trains a step on two processes.
/// @param megabytes what each may take after its session stands; 0 is no limit
outcome run(bool delay, uint64_t megabytes) {
  test::scratch_dir dir;
  launch_options x;
  x.command = {std::filesystem::read_symlink("/proc/self/exe"),
               "rank of a run with little memory"};
  x.ranks = 2;
  x.log_dir = dir.path;
  x.environment = {{"TEST_DIR", dir.path},
                   {"TEST_DELAY", delay ? "1" : "0"},
                   {"TEST_MEGABYTES", std::to_string(megabytes)}};
  outcome result;
  result.code = launch(x);
  result.log = dir.read("log-0.txt") + dir.read("log-1.txt");
  if (result.code == 0) {
    auto file = read_safetensors(dir.path / "state.safetensors");
    for (auto& [name, t] : file.tensors)
      result.state.emplace(name, t);
    result.peak = std::stoull(dir.read("peak"));
  }
  return result;
}

} // namespace

TEST_CASE("rank of a run with little memory", "[.rank]") {
  session_config config;
  config.pipeline_parallel_degree = 2;
  config.microbatches = 2;
  config.threads = 1;
  session s{config};
  if (auto limit = std::stoull(std::getenv("TEST_MEGABYTES")); limit > 0) {
    rlimit bytes{};
    bytes.rlim_cur = bytes.rlim_max = memory("VmData") + (limit << 20);
    REQUIRE(setrlimit(RLIMIT_DATA, &bytes) == 0);
  }
  torch::manual_seed(6);
  auto make = [] {
    delay_param_initialization scope{std::getenv("TEST_DELAY")[0] == '1'};
    return large{};
  };
  distributed_model model{make()};
  std::vector<torch::Tensor> trained;
  for (auto& x : model->parameters())
    if (x.requires_grad())
      trained.push_back(x);
  torch::optim::SGD sgd{trained, 0.1};
  distributed_optimizer optimizer{sgd};
  auto train_step = step([&](torch::Tensor x) {
    auto loss = model(x).pow(2).mean();
    model.backward(loss);
    return loss;
  });
  auto x = torch::linspace(-1, 1, 4 * 2048).view({4, 2048});
  auto loss = train_step(x).reduce_mean();
  optimizer.step();
  auto dir = std::string{std::getenv("TEST_DIR")};
  if (s.rank() == 0)
    std::ofstream{dir + "/peak"} << memory("VmHWM");
  // The whole model is more than a rank may hold.
  named_tensors state{{"loss", loss.detach().view({1})},
                      {"after", torch::randn({4})}};
  double sum = 0;
  for (auto& [name, t] : model.local_named_parameters())
    sum += t.to(torch::kDouble).abs().sum().item<double>();
  auto sums = allgather(sum);
  state.emplace_back("sums", torch::tensor(sums, torch::kDouble));
  if (s.rank() == 0)
    write_safetensors(dir + "/state.safetensors", state);
}

TEST_CASE("a model too large for one process trains if its creation is "
          "delayed",
          "[runtime][delay]") {
  constexpr uint64_t limit = 216; // of the 256 MB that the model takes
  auto expected = run(false, 0);
  INFO(expected.log);
  REQUIRE(expected.code == 0);
  auto refused = run(false, limit);
  CHECK(refused.code != 0);
  CHECK_THAT(refused.log,
             Catch::Matchers::ContainsSubstring("can't allocate memory"));
  auto result = run(true, limit);
  INFO(result.log);
  REQUIRE(result.code == 0);
  REQUIRE(result.state.size() == 3);
  for (auto& [name, x] : expected.state) {
    INFO(name);
    CHECK(result.state.at(name).equal(x));
  }
  // One half of the model is elsewhere.
  CHECK(result.peak + (100u << 20) < expected.peak);
  WARN(fmt::format("peak {} MB, without the delay {} MB", result.peak >> 20,
                   expected.peak >> 20));
}
