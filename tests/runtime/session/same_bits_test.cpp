// ctest: seconds=41
#include "tests/support/catch.hpp"

#include "tests/support/runs/program.hpp"
#include "tests/support/torch/training_step.hpp"
#include "tests/support/torch/two_ranks.hpp"

#include <torch/nn/modules/linear.h>

#include <fmt/format.h>

#include <mutex>
#include <optional>
#include <string>
#include <vector>

// smp.deterministic_server with every schedule and mode: two runs whose
// messages come in other orders give the same bits.

using namespace smp;
using namespace smp::test;
using torch::nn::Linear;

namespace {

constexpr int64_t width = 8;

/// One layer is used over and over, with layers of all ranks between, residual
/// sums and results that the caller looks at: so the order in which calls add
/// to its gradient is a matter of timing.
struct reuse_impl : torch::nn::Module {
  explicit reuse_impl(uint32_t ranks) {
    auto on = [&](uint32_t rank, const char* name) {
      partition_scope scope{rank};
      auto result = submodule<Linear>(width, width);
      register_module(name, result);
      return result;
    };
    shared = on(1, "shared");
    left = on(2 % ranks, "left");
    right = on(3 % ranks, "right");
    own = on(0, "own");
  }

  Tensor forward(Tensor x) {
    for (int i = 0; i < 3; ++i) {
      auto y = shared(right(shared(x)));
      x = left(y + shared(y));
      if (i == 1)
        x = own(torch::tanh(x));
    }
    return x.pow(2).sum();
  }

  submodule<Linear> shared = nullptr, left = nullptr, right = nullptr,
                    own = nullptr;
};
TORCH_MODULE_IMPL(reuse, reuse_impl);

// -- runs ---------------------------------------------------------------------

struct outcome {
  std::string bits; // of loss and gradients
  uint64_t waits = 0;
  bool replayed = false;
};

outcome run(const virtual_world_options& world, uint32_t ranks) {
  outcome result;
  run_virtual_world(ranks, world, [&](session& s) {
    distributed_model model{seeded([&] { return reuse{ranks}; })};
    auto train_step = training_step(model);
    // On four ranks a microbatch is too large to ride in a message (4 KB).
    int64_t rows = ranks == 4 ? 640 : 16;
    auto x = torch::sin(torch::arange(rows * width * 1.0)).view({rows, width});
    Tensor loss;
    for (int i = 0; i < 6; ++i)
      loss = train_step(x.to(torch::kFloat)).reduce_mean();
    auto gradients = model.gradients();
    if (s.rank() != 0)
      return;
    result.waits = s.last_step().waits;
    result.replayed = s.last_step().replayed;
    gradients.emplace_back("loss", loss);
    for (auto& [name, y] : gradients) {
      auto z = y.contiguous();
      result.bits.append(static_cast<const char*>(z.const_data_ptr()),
                         z.nbytes());
    }
  });
  return result;
}

} // namespace

TEST_CASE("two runs give the same bits with every schedule and mode",
          "[runtime][static][fast][deterministic]") {
  auto* pipeline = GENERATE("actor", "interleaved_1f1b", "list", "1f1b",
                            "interleaved", "simple");
  auto ranks = GENERATE(2u, 4u);
  auto replay = GENERATE(false, true);
  // By default, where calls wait, and where they must not.
  auto fast = GENERATE(as<std::optional<bool>>{}, std::nullopt, false, true);
  INFO(pipeline << (!fast   ? ", auto"
                    : *fast ? ", fast"
                            : ", waits")
                << (replay ? ", static" : "") << ", " << ranks << " ranks");
  auto world = manual_world(ranks, 4);
  auto& config = world.config;
  config.pipeline = pipeline;
  config.fast_mode = fast;
  config.static_mode = replay;
  config.deterministic_server = true;
  if (config.pipeline == "interleaved_1f1b")
    config.chunks = 2;
  if (config.pipeline == "list")
    config.schedule.list = {
      {microbatch_id{2}, phase::forward},  {microbatch_id{0}, phase::forward},
      {microbatch_id{0}, phase::backward}, {microbatch_id{1}, phase::forward},
      {microbatch_id{2}, phase::backward}, {microbatch_id{3}, phase::forward},
      {microbatch_id{3}, phase::backward}, {microbatch_id{1}, phase::backward}};
  if (config.pipeline == "actor") {
    config.schedule.plugin = built_program("../lib/unusual_schedule.so");
    config.schedule.name = "unusual";
  }
  auto first = run(world, ranks);
  CHECK(first.replayed);
  for (world.seed = 2; world.seed <= 3; ++world.seed) {
    auto again = run(world, ranks);
    CHECK(again.replayed);
    CHECK(again.bits == first.bits);
  }
}
