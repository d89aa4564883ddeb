// ctest: label=multiprocess
#include "tests/support/catch.hpp"

#include "runtime/base/large_block_allocator.hpp"
#include "runtime/config/config_file.hpp"
#include "runtime/session/script_model.hpp"
#include "runtime/train/models/gpt.hpp"
#include "runtime/train/trainable.hpp"
#include "smp/nn.hpp"
#include "smp/smp.hpp"
#include "tests/support/assertion_lock.hpp"
#include "tests/support/runs/own_ranks.hpp"
#include "tests/support/runs/process_memory.hpp"
#include "tests/support/runs/program.hpp"
#include "tests/support/scratch_dir.hpp"
#include "tests/support/torch/live_bytes.hpp"
#include "tests/support/torch/script_files.hpp"
#include "tests/support/torch/training_step.hpp"
#include "tests/support/torch/two_ranks.hpp"

#include <fmt/format.h>
#include <torch/torch.h>

#include <cstdlib>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

// A model that no process can hold: the kernel refuses memory beyond a limit,
// here of private writable memory (RLIMIT_DATA). Values are compared elsewhere
// (deferred_init_test.cpp).

using namespace smp;
using namespace smp::test;

using Catch::Matchers::ContainsSubstring;

namespace {

constexpr int64_t width = 2048; // 16 MB each
constexpr int64_t layers = 40;
constexpr int64_t layer_bytes = 4 * width * width;

/// What a rank may take besides what it has when its session began (threads,
/// libraries: 130 MB).
constexpr int64_t room = 440 * mb;

/// 640 MB, of which only biases are trained: no gradient is larger than them.
struct tall_impl : torch::nn::Module {
  explicit tall_impl(int64_t n = width) {
    for (int64_t i = 0; i < layers; ++i) {
      torch::nn::Linear x{n, n};
      x->weight.requires_grad_(false);
      body->push_back(x);
    }
    register_module("body", body);
  }

  torch::Tensor forward(torch::Tensor x) {
    return body->forward(x);
  }

  torch::nn::Sequential body;
};
TORCH_MODULE_IMPL(tall, tall_impl);

int64_t number(const char* name) {
  return std::stoll(std::getenv(name));
}

/// Runs ranks under a limit. @returns the exit code
[[maybe_unused]] int launch_limited(const scratch_dir& dir, uint64_t ranks,
                                    bool delay) {
  return launch_case(
    dir, "rank of a run under a limit", ranks,
    {{"TEST_PP", std::to_string(ranks)}, {"TEST_DELAY", delay ? "1" : "0"}});
}

void share_among(session_config& x, uint64_t peers) {
  x.tensor_parallel_degree = peers;
  x.tensor_parallel_modules = {"*"};
  x.ddp = true;
}

} // namespace

TEST_CASE("rank of a run under a limit", "[.rank]") {
  session_config config;
  config.pipeline_parallel_degree = static_cast<uint64_t>(number("TEST_PP"));
  config.microbatches = 2;
  config.trace_device = "none";
  config.threads = 1;
  session s{config};
  auto before = private_bytes();
  limit_private_bytes(before + room);
  torch::manual_seed(1);
  auto made = [] {
    delay_param_initialization scope{number("TEST_DELAY") != 0};
    return tall{};
  }();
  auto created = private_bytes();
  distributed_model model{made};
  auto train_step = training_step(model, mean_square_of);
  model.partition();
  auto partitioned = private_bytes();
  auto loss = train_step(torch::ones({4, width})).reduce_mean();
  CHECK(loss.item<float>() > 0);
  // Nothing is left of what was drawn, and only what is owned was made.
  auto owned = layers / static_cast<int64_t>(s.size()) * layer_bytes;
  fmt::print("before {} created {} partitioned {} trained {} MB\n", before / mb,
             created / mb, partitioned / mb, private_bytes() / mb);
  CHECK(created - before < 2 * layer_bytes);
  CHECK(partitioned - before < owned + 2 * layer_bytes);
}

// The shadow memory of a sanitizer counts, too.
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)

TEST_CASE("a model larger than each rank's limit trains if deferred",
          "[runtime][delay]") {
  auto ranks = GENERATE(2u, 4u);
  CAPTURE(ranks);
  scratch_dir dir;
  auto code = launch_limited(dir, ranks, true);
  INFO(logs_of(dir));
  CHECK(code == 0);
}

TEST_CASE("a model larger than each rank's limit cannot be created at once",
          "[runtime][delay]") {
  scratch_dir dir;
  CHECK(launch_limited(dir, 2, false) != 0);
  auto logs = logs_of(dir);
  INFO(logs);
  CHECK(tells_of_no_memory(logs));
}

TEST_CASE("a configured model that does not fit is an error with a way out",
          "[runtime][delay]") {
  train_config config;
  config.model.type = "gpt";
  config.model.width = 4096;
  config.model.sequence_length = 128;
  config.smp.trace_device = "cpu";
  rlimit usual{};
  REQUIRE(::getrlimit(RLIMIT_DATA, &usual) == 0);
  auto limit = usual;
  limit.rlim_cur = static_cast<rlim_t>(private_bytes() + 100 * mb);
  REQUIRE(::setrlimit(RLIMIT_DATA, &limit) == 0);
  CHECK_THROWS_WITH(make_trainable(config),
                    ContainsSubstring("no memory for the whole model")
                      && ContainsSubstring("smp.trace_device = \"none\""));
  REQUIRE(::setrlimit(RLIMIT_DATA, &usual) == 0);
}

#endif

TEST_CASE("ranks make one tensor at a time of those that they share",
          "[runtime][delay][tensor_parallel]") {
  constexpr int64_t narrow = 128; // tensors are no larger than one piece
  constexpr int64_t whole = 4 * narrow * narrow * sizeof(float);
  constexpr int64_t small = 32 << 10;
  auto peers = GENERATE(2, 4);
  CAPTURE(peers);
  std::mutex mutex;
  std::vector<live_bytes> seen;
  virtual_world_options world;
  share_among(world.config, static_cast<uint64_t>(peers));
  world.config.trace_device = "none";
  world.config.threads = 1;
  auto net_of = [] {
    return gpt{model_sizes{.vocabulary = 64, .layers = 8, .width = narrow}};
  };
  int64_t bytes_of_model = 0;
  for (auto& x : net_of()->parameters())
    bytes_of_model += static_cast<int64_t>(x.nbytes());
  run_virtual_world(static_cast<uint64_t>(peers), world, [&](session&) {
    distributed_model model{seeded([&] {
      delay_param_initialization scope{true};
      return net_of();
    })};
    auto bytes = std::make_shared<live_bytes>();
    {
      c10::DebugInfoGuard guard{c10::DebugInfoKind::PROFILER_STATE, bytes};
      model.partition();
    }
    std::unique_lock guard{mutex};
    seen.push_back(*bytes);
  });
  for (auto& x : seen) {
    CAPTURE(x.now, x.peak, bytes_of_model);
    // A small block that was made before the count began may be freed after
    // that (4 KB were seen).
    CHECK(x.now + small >= bytes_of_model / peers);
    // The largest tensor of a block, which has three times as many bytes and is
    // small enough to be made at once, its slice, and small things.
    CHECK(x.peak <= x.now + whole + whole / peers + small);
    CHECK(x.now < bytes_of_model / peers + whole);
  }
}

namespace {

struct one_table_impl : torch::nn::Module {
  one_table_impl(int64_t rows, int64_t columns)
    : table(torch::nn::EmbeddingOptions(rows, columns).padding_idx(rows - 9)) {
    register_module("table", table);
  }

  torch::Tensor forward(torch::Tensor x) {
    return table(x);
  }

  submodule<torch::nn::Embedding> table;
};
TORCH_MODULE_IMPL(one_table, one_table_impl);

/// A class of one's own, of whose weight each rank keeps some channels.
struct own_weight_impl : torch::nn::Module {
  own_weight_impl(int64_t rows, int64_t columns) {
    smp::nn::parameter_creation_scope cut{*this, /*dim=*/1};
    weight = register_parameter("weight", torch::randn({rows, columns}));
  }

  torch::Tensor forward(torch::Tensor x) {
    return smp::nn::reduce_scatter_for_tp(x.matmul(weight.t()), 0);
  }

  torch::Tensor weight;
};
TORCH_MODULE_IMPL(own_weight, own_weight_impl);

struct own_net_impl : torch::nn::Module {
  own_net_impl(int64_t rows, int64_t columns) : part(rows, columns) {
    register_module("part", part);
  }

  torch::Tensor forward(torch::Tensor x) {
    return part(x);
  }

  submodule<own_weight> part;
};
TORCH_MODULE_IMPL(own_net, own_net_impl);

/// Two ranks share a model of one parameter.
/// @param make makes the model
/// @param expected of one process, several pieces of it
template <class Make>
void check_never_whole(Make make, const torch::Tensor& expected) {
  constexpr int64_t piece = 256 << 10, small = 32 << 10;
  auto whole = static_cast<int64_t>(expected.nbytes());
  virtual_world_options world;
  share_among(world.config, 2);
  world.config.trace_device = "none";
  world.config.threads = 1;
  run_virtual_world(2, world, [&](session&) {
    auto counted = [&](auto f) {
      auto bytes = std::make_shared<live_bytes>();
      c10::DebugInfoGuard guard{c10::DebugInfoKind::PROFILER_STATE, bytes};
      f();
      return bytes;
    };
    decltype(make()) net{nullptr};
    auto made = counted([&] {
      net = seeded([&] {
        delay_param_initialization scope{true};
        return make();
      });
    });
    distributed_model model{net};
    auto parted = counted([&] { model.partition(); });
    auto state = model.state_dict();
    assertion_lock held;
    CAPTURE(made->peak, parted->peak, parted->now);
    CHECK(made->peak <= piece + small);
    CHECK(parted->now < whole / 2 + small);
    CHECK(parted->peak <= parted->now + piece + small);
    CHECK(state.size() == 1);
    for (auto& [name, x] : state)
      CHECK(torch::equal(x, expected));
  });
}

} // namespace

TEST_CASE("a table that ranks share is never there as a whole",
          "[runtime][delay][tensor_parallel]") {
  auto columns = GENERATE(1024, 1023); // by channels, or by rows
  CAPTURE(columns);
  auto make = [&] { return one_table{248, columns}; };
  check_never_whole(make, seeded(make)->table->weight.detach());
}

TEST_CASE("a weight that a class of one's own cuts is never there as a whole",
          "[runtime][delay][tensor_parallel]") {
  constexpr int64_t rows = 250, columns = 1024;
  check_never_whole(
    [&] {
      return own_net{rows, columns};
    },
    seeded([&] {
      return torch::randn({rows, columns});
    }));
}

namespace {

/// Writes a model of one linear. @returns its weight
torch::Tensor write_linear(const std::string& path, int64_t outputs,
                           int64_t inputs) {
  auto unit = std::make_shared<torch::jit::CompilationUnit>();
  auto root = empty_script("model", unit);
  auto fc = empty_script("torch.nn.modules.linear.Linear", unit);
  auto weight = torch::randn({outputs, inputs});
  fc.register_parameter("weight", weight.clone().set_requires_grad(true),
                        false);
  fc.define(
    "def forward(self, x):\n"
    "  return torch.linear(x, self.weight, None)\n");
  root.register_module("fc", fc);
  root.define(
    "def forward(self, x):\n"
    "  return self.fc.forward(x).mean()\n");
  root.save(path);
  return weight;
}

} // namespace

TEST_CASE("a weight of a file that ranks share is never there as a whole",
          "[runtime][delay][tensor_parallel]") {
  constexpr int64_t piece = 256 << 10, small = 32 << 10;
  scratch_dir dir;
  const std::string path = dir.path / "model.pt";
  auto expected = write_linear(path, 250, 1024);
  auto whole = static_cast<int64_t>(expected.nbytes());
  virtual_world_options world;
  share_among(world.config, 2);
  world.config.trace_device = "none";
  world.config.threads = 1;
  run_virtual_world(2, world, [&](session&) {
    auto made = [&] {
      delay_param_initialization scope;
      return load_script(path);
    }();
    distributed_model model{made};
    live_bytes parted;
    {
      auto bytes = std::make_shared<live_bytes>();
      c10::DebugInfoGuard guard{c10::DebugInfoKind::PROFILER_STATE, bytes};
      model.partition();
      parted = *bytes;
    }
    auto state = model.state_dict();
    assertion_lock held;
    CAPTURE(parted.peak, parted.now);
    CHECK(parted.now + small >= whole / 2);
    CHECK(parted.now < whole / 2 + small);
    CHECK(parted.peak <= parted.now + piece + small);
    CHECK(state.size() == 1);
    for (auto& [name, x] : state)
      CHECK(torch::equal(x, expected));
  });
}

TEST_CASE("large tensors made apart leave nothing behind", "[runtime][delay]") {
  // Between them small ones that stay, as while a model is created.
  std::vector<torch::Tensor> small;
  auto before = private_bytes();
  {
    large_block_allocator apart;
    for (int i = 0; i < 16; ++i) {
      torch::zeros({16 * mb / 4}).add_(1);
      small.push_back(torch::ones({100}));
    }
  }
  CHECK(private_bytes() - before < 16 * mb);
  // One that is kept returns its memory later.
  auto kept = [] {
    large_block_allocator apart;
    return torch::ones({64 * mb / 4});
  }();
  CHECK(kept.sum().item<double>() == static_cast<double>(kept.numel()));
  kept.resize_({80 * mb / 4});
  CHECK(kept[0].item<float>() == 1);
  kept.reset();
  CHECK(private_bytes() - before < 16 * mb);
}
