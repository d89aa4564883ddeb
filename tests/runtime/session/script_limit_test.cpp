// ctest: label=multiprocess
#include "tests/support/catch.hpp"

#include "runtime/checkpoint/safetensors.hpp"
#include "runtime/checkpoint/saved_model.hpp"
#include "runtime/session/script_model.hpp"
#include "smp/smp.hpp"
#include "tests/support/runs/own_ranks.hpp"
#include "tests/support/runs/process_memory.hpp"
#include "tests/support/runs/program.hpp"
#include "tests/support/scratch_dir.hpp"
#include "tests/support/torch/plain_gpt.hpp"
#include "tests/support/torch/script_files.hpp"

#include <fmt/format.h>
#include <torch/csrc/jit/serialization/import.h>
#include <torch/torch.h>

#include <cstdlib>
#include <filesystem>
#include <map>

// A TorchScript file that no rank can hold, under a limit of the kernel on
// private writable memory.

using namespace smp;
using namespace smp::test;

using Catch::Matchers::ContainsSubstring;

namespace {

constexpr int64_t width = 2048; // 16 MB each
constexpr int64_t layers = 28;
constexpr int64_t layer_bytes = 4 * width * width;
constexpr int64_t file_bytes = layers * layer_bytes;

/// What a rank may take besides what it has when its session began: with two
/// ranks 224 MB of parameters and 32 of gradients. How many threads execute,
/// each with a stack of 8 MB and the buffers of a matrix product, depends on
/// which microbatch overtakes which.
constexpr int64_t room = 416 * mb;
static_assert(room < file_bytes);

constexpr int steps = 2;
constexpr double learning_rate = 0.1;

std::string environment(const char* name) {
  return std::getenv(name);
}

torch::Tensor batch() {
  return torch::arange(4 * width)
    .remainder(7)
    .sub(3)
    .view({4, width})
    .to(torch::kFloat);
}

} // namespace

TEST_CASE("rank of a file under a limit", "[.rank]") {
  session_config config;
  config.pipeline_parallel_degree = std::stoull(environment("TEST_PP"));
  config.microbatches = 2;
  config.trace_device = "none";
  config.threads = 1;
  session s{config};
  auto before = private_bytes();
  limit_private_bytes(before + room);
  auto made = [] {
    delay_param_initialization scope{environment("TEST_DELAY") == "1"};
    return load_script(environment("TEST_DIR") + "/model.pt");
  }();
  auto loaded = private_bytes();
  distributed_model model{made};
  auto train_step = step([&](torch::Tensor x) {
    auto loss = loss_of(model(x));
    model.backward(loss);
    return loss.detach();
  });
  model.partition();
  auto partitioned = private_bytes();
  std::vector<double> losses;
  for (int i = 0; i < steps; ++i) {
    for (auto& p : model.local_parameters())
      p.mutable_grad() = torch::Tensor{};
    losses.push_back(train_step(batch()).reduce_mean().item<double>());
    torch::NoGradGuard no_grad;
    if (i + 1 < steps)
      for (auto& p : model.local_parameters())
        if (p.grad().defined())
          p.sub_(p.grad(), learning_rate);
  }
  auto dir = environment("TEST_DIR");
  save_gradients(dir + "/gradients", model);
  save_state(dir + "/state", model); // larger than the limit, too
  if (s.rank() == 0)
    write_safetensors(dir + "/losses", {{"losses", torch::tensor(losses)}});
  auto owned = layers / static_cast<int64_t>(s.size()) * layer_bytes;
  fmt::print("before {} loaded {} partitioned {} trained {} MB\n", before / mb,
             loaded / mb, partitioned / mb, private_bytes() / mb);
  CHECK(loaded - before < layer_bytes);
  CHECK(partitioned - before < owned + 2 * layer_bytes);
}

// The shadow memory of a sanitizer counts, too.
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)

namespace {

/// Runs ranks under a limit. @returns the exit code
int launch_limited(const scratch_dir& dir, uint64_t ranks, bool delay) {
  return launch_case(
    dir, "rank of a file under a limit", ranks,
    {{"TEST_PP", std::to_string(ranks)}, {"TEST_DELAY", delay ? "1" : "0"}});
}

using tensors = std::map<std::string, torch::Tensor>;

/// What one process has without smp, by the names of the ranks' files.
std::map<std::string, tensors> expected(const std::string& path) {
  auto plain = torch::jit::load(path);
  std::vector<double> losses;
  for (int i = 0; i < steps; ++i) {
    double sum = 0;
    for (auto x : plain.named_parameters(true))
      x.value.mutable_grad() = torch::Tensor{};
    for (auto& x : batch().chunk(2)) {
      auto loss = plain.forward({x}).toTensor() / 2;
      loss.backward();
      sum += loss.item<double>();
    }
    losses.push_back(sum);
    torch::NoGradGuard no_grad;
    for (auto x : plain.named_parameters(true))
      if (auto g = x.value.grad(); g.defined() && i + 1 < steps)
        x.value.sub_(g, learning_rate);
  }
  std::map<std::string, tensors> result;
  for (auto x : plain.named_parameters(true)) {
    result["state"].emplace(x.name, x.value.detach());
    if (x.value.grad().defined())
      result["gradients"].emplace(x.name, x.value.grad());
  }
  result["losses"].emplace("losses", torch::tensor(losses));
  return result;
}

} // namespace

TEST_CASE(
  "a file larger than each rank's limit trains with the numbers of one "
  "process",
  "[runtime][script][delay]") {
  scratch_dir dir;
  script_chain(layers, width, 2).save(dir.path / "model.pt");
  REQUIRE(std::filesystem::file_size(dir.path / "model.pt")
          > static_cast<uint64_t>(room));
  auto wanted = expected(dir.path / "model.pt");
  for (uint64_t ranks : {2, 4}) {
    CAPTURE(ranks);
    auto code = launch_limited(dir, ranks, true);
    INFO(logs_of(dir));
    REQUIRE(code == 0);
    for (auto& [file, xs] : wanted) {
      auto found = read_safetensors(dir.path / file);
      CHECK(found.tensors.size() == xs.size());
      for (auto& [name, x] : xs) {
        INFO(file << ": " << name);
        REQUIRE(found.find(name) != nullptr);
        CHECK(excess(*found.find(name), x) <= 0);
      }
    }
  }
  // The limit is one: it does not load as a whole.
  CHECK(launch_limited(dir, 2, false) != 0);
  CHECK_THAT(logs_of(dir), ContainsSubstring("no memory for all of '")
                             && ContainsSubstring("smp.trace_device"));
}

#endif
