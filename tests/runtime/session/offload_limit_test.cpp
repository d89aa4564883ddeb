// ctest: label=multiprocess
#include "tests/support/catch.hpp"

#include "runtime/launch/launcher.hpp"
#include "runtime/offload/offload_store.hpp"
#include "runtime/session/rank_runtime.hpp"
#include "smp/smp.hpp"
#include "tests/support/runs/process_memory.hpp"
#include "tests/support/scratch_dir.hpp"

#include <fmt/format.h>
#include <torch/torch.h>

#include <cstdlib>
#include <filesystem>

#include <malloc.h>

// Arguments of checkpointed calls that no process can hold (R57): the kernel
// refuses memory beyond a limit, here of private writable memory (RLIMIT_DATA),
// to which a file does not count.

using namespace smp;
using namespace smp::test;

namespace {

constexpr int64_t rows = 512;
constexpr int64_t wide = 4096;
constexpr int64_t narrow = 32;
constexpr int64_t blocks = 48;

/// What a rank may take besides what it has before its first step: gradients
/// (24 MB), two arguments on their way out and two that are read ahead (8 MB
/// each), a block with its gradients (32 MB), and of each microbatch what it
/// sends, gets and makes a loss of (some 40 MB). The arguments of its half of
/// the blocks are 192 MB of each microbatch.
constexpr int64_t room = 288 * mb;

struct waist_impl : torch::nn::Module {
  waist_impl() {
    register_module("down", down);
    register_module("up", up);
  }

  torch::Tensor forward(torch::Tensor x) {
    return up(torch::gelu(down(x)));
  }

  torch::nn::Linear down{wide, narrow}, up{narrow, wide};
};
TORCH_MODULE_IMPL(waist, waist_impl);

struct waist_tower_impl : torch::nn::Module {
  waist_tower_impl() {
    for (int64_t i = 0; i < blocks; ++i)
      body->push_back(waist{});
    register_module("body", body);
  }

  torch::Tensor forward(torch::Tensor x) {
    return body->forward(x);
  }

  torch::nn::Sequential body;
};
TORCH_MODULE_IMPL(waist_tower, waist_tower_impl);

/// Runs two ranks under a limit. @returns the exit code
[[maybe_unused]] int run_ranks(const scratch_dir& dir,
                               const std::string& offload) {
  launch_options x;
  x.command = {std::filesystem::read_symlink("/proc/self/exe"),
               "rank of many arguments"};
  x.ranks = 2;
  x.log_dir = dir.path;
  x.environment = {{"TEST_OFFLOAD", offload}};
  return launch(x);
}

} // namespace

TEST_CASE("rank of many arguments", "[.rank]") {
  session_config config;
  config.pipeline_parallel_degree = 2;
  config.microbatches = 2;
  config.trace_device = "none";
  config.threads = 1;
  config.activation_checkpointing.modules = {"body"};
  config.offload_activations = std::getenv("TEST_OFFLOAD")
                               == std::string{"yes"};
  if (config.offload_activations)
    config.activation_loading_horizon = 2;
  // Else what is free counts, too.
  ::mallopt(M_MMAP_THRESHOLD, 1 << 20);
  session s{config};
  torch::manual_seed(1);
  distributed_model model{waist_tower{}};
  auto train_step = step([&](torch::Tensor x) {
    auto loss = model(x).square().mean();
    model.backward(loss);
    return loss.detach();
  });
  model.partition();
  auto before = private_bytes();
  limit_private_bytes(before + room);
  for (int i = 0; i < 2; ++i) {
    auto loss = train_step(torch::ones({2 * rows, wide})).reduce_mean();
    CHECK(loss.item<float>() > 0);
  }
  auto x = s.internals().offload()->status();
  CHECK(x.written > 2 * 2 * 16 * 8 * uint64_t{mb});
  fmt::print("before {} trained {} MB, file {} MB, waited {:.2f} s\n",
             before / mb, private_bytes() / mb, x.file_bytes / mb,
             x.wait_seconds);
}

// The shadow memory of a sanitizer counts, too.
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)

TEST_CASE("arguments beyond each rank's limit are in its file",
          "[runtime][R57][memory]") {
  scratch_dir dir;
  auto code = run_ranks(dir, "yes");
  INFO(dir.read("log-0.txt") << dir.read("log-1.txt"));
  CHECK(code == 0);
}

TEST_CASE("arguments beyond each rank's limit cannot be in memory",
          "[runtime][R57][memory]") {
  scratch_dir dir;
  CHECK(run_ranks(dir, "no") != 0);
  auto logs = dir.read("log-0.txt") + dir.read("log-1.txt");
  INFO(logs);
  CHECK(tells_of_no_memory(logs));
}

#endif
