// ctest: label=multiprocess
#include "tests/support/catch.hpp"

#include "runtime/launch/launcher.hpp"
#include "smp/smp.hpp"
#include "tests/support/runs/process_memory.hpp"
#include "tests/support/scratch_dir.hpp"

#include <fmt/format.h>
#include <torch/torch.h>

#include <cstdlib>
#include <filesystem>

#include <malloc.h>

// Activations that no process can hold (R52): the kernel refuses memory beyond
// a limit, here of private writable memory (RLIMIT_DATA).

using namespace smp;
using namespace smp::test;

namespace {

constexpr int64_t rows = 512;
constexpr int64_t narrow = 64;
constexpr int64_t wide = 4096;
constexpr int64_t blocks = 32;

/// What a rank may take besides what it has before its first step: gradients
/// (34 MB), and one block with its gradients. Without checkpointing its half of
/// the blocks keeps 256 MB of a microbatch.
constexpr int64_t room = 160 * mb;

struct wide_block_impl : torch::nn::Module {
  wide_block_impl() {
    register_module("up", up);
    register_module("down", down);
  }

  torch::Tensor forward(torch::Tensor x) {
    return down(torch::gelu(up(x)));
  }

  torch::nn::Linear up{narrow, wide}, down{wide, narrow};
};
TORCH_MODULE_IMPL(wide_block, wide_block_impl);

struct wide_tower_impl : torch::nn::Module {
  wide_tower_impl() {
    for (int64_t i = 0; i < blocks; ++i)
      body->push_back(wide_block{});
    register_module("body", body);
  }

  torch::Tensor forward(torch::Tensor x) {
    return body->forward(x);
  }

  torch::nn::Sequential body;
};
TORCH_MODULE_IMPL(wide_tower, wide_tower_impl);

/// Runs two ranks under a limit. @returns the exit code
[[maybe_unused]] int run_ranks(const scratch_dir& dir,
                               const std::string& modules) {
  launch_options x;
  x.command = {std::filesystem::read_symlink("/proc/self/exe"),
               "rank of many activations"};
  x.ranks = 2;
  x.log_dir = dir.path;
  x.environment = {{"TEST_MODULES", modules}};
  return launch(x);
}

} // namespace

TEST_CASE("rank of many activations", "[.rank]") {
  session_config config;
  config.pipeline_parallel_degree = 2;
  config.microbatches = 1;
  config.trace_device = "none";
  config.threads = 1;
  if (std::string names = std::getenv("TEST_MODULES"); !names.empty())
    config.activation_checkpointing.modules = {names};
  // Else what is free counts, too.
  ::mallopt(M_MMAP_THRESHOLD, 1 << 20);
  session s{config};
  torch::manual_seed(1);
  distributed_model model{wide_tower{}};
  auto train_step = step([&](torch::Tensor x) {
    auto loss = model(x).square().mean();
    model.backward(loss);
    return loss.detach();
  });
  model.partition();
  auto before = private_bytes();
  limit_private_bytes(before + room);
  auto loss = train_step(torch::ones({rows, narrow})).reduce_mean();
  CHECK(loss.item<float>() > 0);
  fmt::print("before {} trained {} MB\n", before / mb, private_bytes() / mb);
}

// The shadow memory of a sanitizer counts, too.
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)

TEST_CASE("activations beyond each rank's limit are computed again",
          "[runtime][R52][memory]") {
  scratch_dir dir;
  auto code = run_ranks(dir, "body");
  INFO(dir.read("log-0.txt") << dir.read("log-1.txt"));
  CHECK(code == 0);
}

TEST_CASE("activations beyond each rank's limit cannot be kept",
          "[runtime][R52][memory]") {
  scratch_dir dir;
  CHECK(run_ranks(dir, "") != 0);
  auto logs = dir.read("log-0.txt") + dir.read("log-1.txt");
  INFO(logs);
  CHECK(tells_of_no_memory(logs));
}

#endif
