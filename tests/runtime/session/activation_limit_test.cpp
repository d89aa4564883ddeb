// ctest: label=multiprocess
#include "tests/support/catch.hpp"

#include "runtime/offload/offload_store.hpp"
#include "runtime/session/rank_runtime.hpp"
#include "smp/smp.hpp"
#include "tests/support/runs/own_ranks.hpp"
#include "tests/support/runs/process_memory.hpp"
#include "tests/support/torch/training_step.hpp"

#include <fmt/format.h>
#include <torch/torch.h>

#include <cstdlib>

#include <malloc.h>

// Activations that no process can hold: the kernel refuses memory beyond a
// limit, here of private writable memory (RLIMIT_DATA), to which a file does
// not count.

using namespace smp;
using namespace smp::test;

namespace {

constexpr int64_t rows = 512;

/// Blocks of two Linear layers with a GELU between them.
struct tower_sizes {
  int64_t outside, inside, blocks;
  uint64_t microbatches;
  /// What a rank may take besides what it has before its first step.
  int64_t room;
};

/// Its half of the blocks keeps 256 MB of a microbatch, if nothing is computed
/// again (R52). There is room for gradients (34 MB), and for one block with its
/// gradients.
constexpr tower_sizes wide_inside{64, 4096, 32, 1, 160 * mb};

/// The arguments of its half of the blocks are 192 MB of each microbatch, if
/// they are not in a file (R57). There is room for gradients (24 MB), two
/// arguments on their way out and two that are read ahead (8 MB each), a block
/// with its gradients (32 MB), and of each microbatch what it sends, gets and
/// makes a loss of (some 40 MB).
constexpr tower_sizes wide_outside{4096, 32, 48, 2, 288 * mb};

struct limited_block_impl : torch::nn::Module {
  explicit limited_block_impl(const tower_sizes& x)
    : in(x.outside, x.inside), out(x.inside, x.outside) {
    register_module("in", in);
    register_module("out", out);
  }

  torch::Tensor forward(torch::Tensor x) {
    return out(torch::gelu(in(x)));
  }

  torch::nn::Linear in, out;
};
TORCH_MODULE_IMPL(limited_block, limited_block_impl);

struct limited_tower_impl : torch::nn::Module {
  explicit limited_tower_impl(const tower_sizes& x) {
    for (int64_t i = 0; i < x.blocks; ++i)
      body->push_back(limited_block{x});
    register_module("body", body);
  }

  torch::Tensor forward(torch::Tensor x) {
    return body->forward(x);
  }

  torch::nn::Sequential body;
};
TORCH_MODULE_IMPL(limited_tower, limited_tower_impl);

bool is_set(const char* name) {
  return std::getenv(name) == std::string{"yes"};
}

} // namespace

TEST_CASE("rank of many activations", "[.rank]") {
  const auto again = is_set("TEST_AGAIN");
  const auto offload = is_set("TEST_OFFLOAD");
  const auto& sizes = is_set("TEST_WIDE_INSIDE") ? wide_inside : wide_outside;
  session_config config;
  config.pipeline_parallel_degree = 2;
  config.microbatches = sizes.microbatches;
  config.trace_device = "none";
  config.threads = 1;
  if (again)
    config.activation_checkpointing.modules = {"body"};
  config.offload_activations = offload;
  if (offload)
    config.activation_loading_horizon = 2;
  // Else what is free counts, too.
  ::mallopt(M_MMAP_THRESHOLD, 1 << 20);
  session s{config};
  torch::manual_seed(1);
  distributed_model model{limited_tower{sizes}};
  auto train_step = training_step(model, mean_square_of);
  model.partition();
  auto before = private_bytes();
  limit_private_bytes(before + sizes.room);
  const auto samples = static_cast<int64_t>(sizes.microbatches) * rows;
  for (int i = 0; i < 2; ++i) {
    auto loss = train_step(torch::ones({samples, sizes.outside})).reduce_mean();
    CHECK(loss.item<float>() > 0);
  }
  fmt::print("before {} trained {} MB\n", before / mb, private_bytes() / mb);
  if (!offload)
    return;
  auto x = s.internals().offload()->status();
  CHECK(x.written > 2 * 2 * 16 * 8 * uint64_t{mb});
  fmt::print("file {} MB, waited {:.2f} s\n", x.file_bytes / mb,
             x.wait_seconds);
}

// The shadow memory of a sanitizer counts, too.
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)

TEST_CASE(
  "activations beyond each rank's limit are computed again, or in its "
  "file, and cannot be kept",
  "[runtime][R52][R57][memory]") {
  struct row {
    std::string inside, again, offload;
    bool fits;
  };
  auto x = GENERATE(
    row{"yes", "yes", "no", true}, row{"yes", "no", "no", false},
    row{"no", "yes", "yes", true}, row{"no", "yes", "no", false});
  CAPTURE(x.inside, x.again, x.offload);
  scratch_dir dir;
  auto code = launch_case(dir, "rank of many activations", 2,
                          {{"TEST_WIDE_INSIDE", x.inside},
                           {"TEST_AGAIN", x.again},
                           {"TEST_OFFLOAD", x.offload}});
  auto logs = logs_of(dir);
  INFO(logs);
  CHECK((code == 0) == x.fits);
  CHECK(tells_of_no_memory(logs) != x.fits);
}

#endif
