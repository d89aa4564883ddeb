// ctest: seconds=30
#include "tests/support/catch.hpp"

#include "runtime/checkpoint/checkpoint.hpp"
#include "runtime/config/session_config.hpp"
#include "runtime/device/rank_device.hpp"
#include "tests/simulated/driver/failures.hpp"
#include "tests/simulated/driver/host_waits.hpp"
#include "tests/simulated/driver/memory.hpp"
#include "tests/simulated/driver/streams.hpp"
#include "tests/simulated/mistakes.hpp"
#include "tests/support/scratch_dir.hpp"
#include "tests/support/torch/numbers.hpp"
#include "tests/support/torch/simulated.hpp"
#include "tests/support/torch/training_step.hpp"
#include "tests/support/torch/two_ranks.hpp"
#include "tests/support/torch/verify_jobs.hpp"

#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <mutex>
#include <optional>
#include <ostream>
#include <string>
#include <tuple>
#include <vector>

// An optimizer whose state is in host memory while modules compute on a device
// (`smp.offload_optimizer`).

using namespace smp;
using namespace smp::test;
using Catch::Matchers::ContainsSubstring;

namespace {

constexpr int64_t words = 40, side = 512, inner = 1024;

/// Parameters of 2 MB, which are copied alone, and small ones: with gaps, one
/// number, none, without a gradient. The large ones are on the last rank.
struct net_impl : torch::nn::Module {
  explicit net_impl(uint64_t ranks) {
    table = submodule<torch::nn::Embedding>(words, side);
    register_module("table", table);
    {
      partition_scope scope{static_cast<uint32_t>(ranks - 1)};
      up = submodule<torch::nn::Linear>(side, inner);
      down = submodule<torch::nn::Linear>(inner, side);
      register_module("up", up);
      register_module("down", down);
    }
    never = submodule<torch::nn::Linear>(3, 3);
    register_module("never", never);
    scale = register_parameter("scale", torch::full({}, 0.5));
    turned = register_parameter("turned", torch::rand({side, 4}).mul_(0.1).t());
    nothing = register_parameter("nothing", torch::zeros({0, 4}));
  }

  Tensor forward(Tensor x) {
    auto h = table(x).mean(1);
    h = h + down(torch::tanh(up(h))) * scale;
    auto y = torch::matmul(h, turned.t()).to(torch::kFloat);
    return y.square().mean() + nothing.to(torch::kFloat).sum();
  }

  submodule<torch::nn::Embedding> table = nullptr;
  submodule<torch::nn::Linear> up = nullptr, down = nullptr, never = nullptr;
  Tensor scale, turned, nothing;
};
TORCH_MODULE_IMPL(net, net_impl);

struct job {
  std::string optimizer = "adamw";
  bool fused = false;
  uint64_t pipeline = 1, replicas = 1;
  /// Stage of ZeRO.
  int shards = 0;
  torch::ScalarType type = torch::kFloat;
  std::optional<double> loss_scale = {}; // at first
  bool averages = false;

  // Where it runs, which changes no number.
  std::string device = "sim";
  bool offload = true;
  int64_t first = 0, last = 4; // steps
  std::string checkpoints = {};
};

std::ostream& operator<<(std::ostream& out, const job& x) {
  return out << x.optimizer << (x.fused ? ", fused" : "") << ", " << x.pipeline
             << " x " << x.replicas << " ranks, ZeRO " << x.shards << ", "
             << x.type << ", scale " << x.loss_scale.value_or(1)
             << (x.averages ? ", averages" : "");
}

virtual_world_options world_of(const job& x) {
  auto world = manual_world(x.pipeline, 2);
  auto& c = world.config;
  world.reorder = false;
  c.device = x.device;
  c.offload_optimizer = x.offload;
  c.ddp = x.replicas > 1;
  c.shard_optimizer_state = x.shards > 0;
  c.shard_gradients = x.shards > 1;
  c.bf16_params = x.type == torch::kBFloat16;
  c.fp16_params = x.type == torch::kHalf;
  c.deterministic_server = true;
  return world;
}

using torch::optim::OptimizerParamGroup;

template <class Optimizer, class Options>
std::unique_ptr<torch::optim::Optimizer>
with_groups(std::vector<OptimizerParamGroup> groups, Options options) {
  groups.at(1).set_options(
    std::make_unique<Options>(Options{options}.weight_decay(0)));
  return std::make_unique<Optimizer>(std::move(groups), options);
}

std::unique_ptr<torch::optim::Optimizer>
make_optimizer(const std::string& type, const torch::nn::Module& model) {
  std::vector<Tensor> matrices, others;
  for (auto& p : model.parameters())
    (p.dim() > 1 ? matrices : others).push_back(p);
  std::vector<OptimizerParamGroup> groups{OptimizerParamGroup{matrices},
                                          OptimizerParamGroup{others}};
  using namespace torch::optim;
  if (type == "adamw")
    return with_groups<AdamW>(groups, AdamWOptions{1e-3}.amsgrad(true));
  if (type == "adam")
    return with_groups<Adam>(groups, AdamOptions{1e-3}.weight_decay(0.1));
  if (type == "adagrad")
    return with_groups<Adagrad>(groups, AdagradOptions{1e-2});
  if (type == "rmsprop")
    return with_groups<RMSprop>(groups, RMSpropOptions{1e-3}.momentum(0.5));
  return with_groups<SGD>(groups, SGDOptions{1e-2}.momentum(0.9));
}

Tensor data_of(const job& x, int64_t step) {
  auto rows = static_cast<int64_t>(8 * x.replicas);
  auto all = (torch::arange(rows * 3).view({rows, 3}) * 7 + 11 * step) % words;
  return all.chunk(static_cast<int64_t>(x.replicas))
    .at(x.replicas > 1 ? dp_rank() : 0)
    .to(torch::kLong);
}

struct outcome {
  std::vector<double> losses, norms;
  std::vector<bool> updated;
  numbers parameters, state, seen;
  std::string race, error;
  uint64_t memory = 0, peak = 0; // of the device after the second step
  sim::host_wait_counts waits;   // of the last update
};

/// Parameters as kernels find them that are launched now, and at once others.
void swap_averages(distributed_model<net>& model,
                   distributed_optimizer& optimizer, int64_t step,
                   numbers& seen) {
  std::vector<std::pair<std::string, Tensor>> copies;
  for (auto& [name, p] : model.local_named_parameters())
    copies.emplace_back(name, p.detach().clone());
  optimizer.swap_averages();
  for (auto& [name, p] : model.local_named_parameters())
    copies.emplace_back("average of " + name, p.detach().clone());
  optimizer.swap_averages();
  auto rank = std::to_string(session::current().rank());
  static std::mutex mutex;
  std::lock_guard guard{mutex};
  for (auto& [name, x] : copies)
    seen[std::to_string(step) + ' ' + rank + ' ' + name] = x.cpu();
}

void train(const job& x, session& s, outcome& out) {
  distributed_model model{seeded([&] { return net{x.pipeline}; })};
  auto inner = make_optimizer(x.optimizer, *model);
  optimizer_options options;
  options.fused = x.fused;
  if (x.loss_scale) {
    options.dynamic_loss_scale = true;
    options.dynamic_loss_args.init_scale = *x.loss_scale;
  }
  if (x.averages)
    options.ema_decay = 0.5;
  distributed_optimizer optimizer{*inner, options};
  if (x.first > 0)
    resume_from_checkpoint(x.checkpoints, model, {&optimizer});
  auto train_step = training_step(model);
  auto* device = s.internals().launches();
  for (auto i = x.first; i < x.last; ++i) {
    optimizer.zero_grad();
    auto loss = train_step(data_of(x, i)).reduce_mean();
    auto norm = clip_grad_norm_(model, INFINITY);
    barrier();
    sim::reset_host_waits();
    barrier();
    auto updated = optimizer.step();
    barrier();
    if (s.rank() == 0)
      out.waits = sim::host_waits();
    if (device != nullptr && i == 1) {
      out.memory = device->look_at_memory().now;
      out.peak = device->look_at_memory().peak;
    }
    if (x.averages)
      swap_averages(model, optimizer, i, out.seen);
    if (i == 2) // the program changes parameters
      for (auto& p : model.local_parameters()) {
        torch::NoGradGuard no_grad;
        p.mul_(0.5);
        // Rows of a parameter, and float32 weights, do not see this.
        if (p.dim() == 1 && x.shards == 0 && x.type == torch::kFloat)
          p.set_data(p * 0.5);
      }
    if (s.rank() != 0)
      continue;
    out.losses.push_back(loss.item<double>());
    out.norms.push_back(norm);
    out.updated.push_back(updated);
  }
  if (!x.checkpoints.empty() && x.first == 0)
    save_checkpoint(x.checkpoints, static_cast<uint64_t>(x.last), model,
                    {&optimizer});
  auto parameters = model.state_dict();
  auto state = optimizer.state_dict();
  if (s.rank() != 0)
    return;
  for (auto& [name, y] : parameters)
    out.parameters[name] = y.cpu();
  for (auto& [name, y] : state)
    out.state[name] = y.cpu();
}

outcome run(const job& x, int delay_us = 100) {
  outcome result;
  checked_devices devices{delay_us};
  sim::reset_peak(0);
  try {
    run_virtual_world(x.pipeline * x.replicas, world_of(x),
                      [&](session& s) { train(x, s, result); });
  } catch (const std::exception& e) {
    result.error = e.what();
  }
  result.race = devices.race();
  return result;
}

bool same(const numbers& x, const numbers& y) {
  return std::ranges::equal(x, y, [](auto& a, auto& b) {
    return a.first == b.first && at::equal(a.second, b.second);
  });
}

bool same(const outcome& x, const outcome& y) {
  return x.losses == y.losses && x.updated == y.updated
         && same(x.parameters, y.parameters) && same(x.state, y.state)
         && same(x.seen, y.seen);
}

job on_host(job x) {
  x.device = "cpu";
  return x;
}

void check_same(const outcome& found, const outcome& expected) {
  CHECK(found.error == "");
  CHECK(found.race == "");
  CHECK(found.losses == expected.losses);
  // Sums of squares are added in another order there.
  CHECK(std::ranges::equal(found.norms, expected.norms, [](auto x, auto y) {
    return std::abs(x - y) <= 1e-9 * y || !std::isfinite(y);
  }));
  CHECK(found.updated == expected.updated);
  CHECK(same(found.parameters, expected.parameters));
  CHECK(same(found.state, expected.state));
  CHECK(same(found.seen, expected.seen));
}

} // namespace

TEST_CASE("an optimizer in host memory has the numbers of ranks on the host",
          "[runtime][device][optimizer]") {
  constexpr auto half = torch::kHalf, bfloat16 = torch::kBFloat16;
  auto x = GENERATE_COPY(
    job{}, job{.fused = true}, job{.optimizer = "adam", .fused = true},
    job{.optimizer = "adagrad", .fused = true}, job{.optimizer = "sgd"},
    job{.optimizer = "rmsprop"}, job{.pipeline = 2, .averages = true},
    job{.replicas = 2, .shards = 1, .averages = true},
    job{.optimizer = "adagrad", .replicas = 2, .shards = 2},
    job{.pipeline = 2, .replicas = 2, .shards = 2, .loss_scale = 64},
    job{.fused = true, .type = bfloat16, .averages = true},
    job{.optimizer = "sgd", .replicas = 2, .shards = 2, .type = bfloat16},
    job{.optimizer = "adagrad", .type = half, .loss_scale = 0x1p22},
    job{.pipeline = 2, .type = half, .loss_scale = 0x1p22, .averages = true});
  CAPTURE(x);
  auto expected = run(on_host(x));
  REQUIRE(expected.error == "");
  REQUIRE(expected.state.size() > 0);
  // The case says something only if a scale is too large, and not for ever.
  auto skipped = std::ranges::count(expected.updated, false);
  CHECK((x.loss_scale.value_or(0) > 64 ? skipped > 0 && skipped < 4
                                       : skipped == 0));
  check_same(run(x), expected);
}

TEST_CASE("the state of an optimizer in host memory is not on the device",
          "[runtime][device][optimizer]") {
  auto [averages, type] = GENERATE(std::tuple{false, torch::kFloat},
                                   std::tuple{true, torch::kFloat},
                                   std::tuple{false, torch::kBFloat16});
  job x{.type = type, .averages = averages, .last = 3};
  CAPTURE(x);
  auto moved = run(x);
  x.offload = false;
  auto kept = run(x);
  CHECK(moved.error == "");
  CHECK(kept.error == "");
  CHECK(moved.waits.number == 0); // but for the gradients
  // Three tensors of `amsgrad`, and averages or float32 weights.
  const uint64_t weights = 2 * side * inner * sizeof(float);
  auto state = (averages || type != torch::kFloat ? 4 : 3) * weights;
  CAPTURE(moved.memory, moved.peak, kept.memory, kept.peak);
  CHECK(kept.memory >= state + moved.memory);
  CHECK(kept.peak >= state + moved.peak);
  // Parameters and their gradients are left.
  CHECK(moved.memory < (type == torch::kFloat ? 2.2 : 1.1) * weights);
}

TEST_CASE("a checkpoint of an optimizer in host memory is resumed anywhere",
          "[runtime][device][optimizer][R51]") {
  struct place {
    std::string device;
    bool offload;
  };
  const place there{"sim", true}, device{"sim", false}, host{"cpu", false};
  struct change {
    place before, after;
  };
  auto [before, after] = GENERATE_COPY(
    change{there, there}, change{there, device}, change{device, there},
    change{there, host}, change{host, there});
  auto type = GENERATE(torch::kFloat, torch::kBFloat16);
  CAPTURE(before.device, before.offload, after.device, after.offload, type);
  job x{.pipeline = 2, .type = type, .averages = true};
  auto expected = run(on_host(x));
  scratch_dir dir;
  x.checkpoints = dir.path.string();
  x.device = before.device;
  x.offload = before.offload;
  x.last = 2;
  CHECK(run(x).error == "");
  x.device = after.device;
  x.offload = after.offload;
  x.first = 2;
  x.last = 4;
  auto found = run(x);
  CHECK(found.error == "");
  CHECK(found.race == "");
  REQUIRE(expected.losses.size() == 4);
  expected.losses.erase(expected.losses.begin(), expected.losses.begin() + 2);
  // An average on the device has other last digits.
  if (after.device == "sim" && !after.offload) {
    check_near(found.parameters, expected.parameters);
    check_near(found.state, expected.state);
  } else {
    CHECK(found.losses == expected.losses);
    CHECK(same(found.parameters, expected.parameters));
    CHECK(same(found.state, expected.state));
  }
}

TEST_CASE("mistakes with an optimizer in host memory are seen",
          "[runtime][device][optimizer]") {
  constexpr auto delay_us = 1000; // longer than the host needs to go on
  const job x{.averages = true, .last = 2};
  static const auto right = run(x, delay_us);
  REQUIRE(right.error == "");
  REQUIRE(right.race == "");
  auto* name = GENERATE("early-overwrite", "unawaited-overwrite",
                        "unawaited-gradients", "unawaited-values");
  sim::seed_mistake(name);
  auto wrong = run(x, delay_us);
  sim::seed_mistake(nullptr);
  INFO(name << ": " << wrong.race << wrong.error);
  CHECK((wrong.race != "" || wrong.error != "" || !same(wrong, right)));
}

TEST_CASE("a device that fails ends the wait for gradients",
          "[runtime][device][optimizer]") {
  checked_devices devices{0};
  std::string why;
  run_virtual_world(1, world_of({}), [&](session&) {
    distributed_model model{seeded([&] { return net{1}; })};
    auto inner = make_optimizer("sgd", *model);
    distributed_optimizer optimizer{*inner};
    auto train_step = training_step(model);
    train_step(data_of({}, 0));
    auto stream = sim::current_stream(0);
    sim::launch(0, stream, "broken kernel", [] { sim::fail_device(0); });
    try {
      optimizer.step();
    } catch (const std::exception& e) {
      why = e.what();
    }
  });
  CHECK_THAT(why, ContainsSubstring("a kernel has failed"));
}

TEST_CASE("an optimizer in host memory equals one process on the device",
          "[runtime][device][optimizer][verify]") {
  for (auto half : {false, true}) {
    auto x = gpt_case(2, "interleaved", 4);
    x.config.smp.device = "sim";
    x.config.smp.offload_optimizer = true;
    x.config.smp.bf16_params = half;
    x.config.optimizer.clip_grad_norm = 0.1;
    CHECK(to_text(run_case(x, 3)).starts_with("equal: 3 steps"));
  }
}
