#include "tests/support/catch.hpp"

#include "tests/support/torch/two_ranks.hpp"

#include <fmt/format.h>
#include <torch/nn/modules/linear.h>

#include <map>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

// Modules with a buffer that stays as it is, such as a table of frequencies:
// their microbatches keep an order in the first training step only (R19), so
// that it is not a step like the others (R33).

using namespace smp;
using namespace smp::test;

namespace {

constexpr int64_t width = 8;
constexpr uint64_t microbatches = 6;

struct scaled_block_impl : torch::nn::Module {
  scaled_block_impl() : inv(torch::linspace(0.5, 2, width)) {
    register_module("fc", fc);
    register_buffer("inv", inv);
  }

  Tensor forward(Tensor x) {
    return x + torch::tanh(fc(x) * inv);
  }

  torch::nn::Linear fc{width, width};
  Tensor inv;
};
TORCH_MODULE_IMPL(scaled_block, scaled_block_impl);

/// One block on each rank.
struct scaled_stack_impl : torch::nn::Module {
  explicit scaled_stack_impl(uint32_t ranks) {
    for (uint32_t i = 0; i < ranks; ++i) {
      partition_scope on{i};
      blocks.emplace_back(submodule<scaled_block>{});
      register_module(fmt::format("block{}", i), blocks.back());
    }
  }

  Tensor forward(Tensor x) {
    for (auto& block : blocks)
      x = block(x);
    return x.pow(2).mean();
  }

  std::vector<submodule<scaled_block>> blocks;
};
TORCH_MODULE_IMPL(scaled_stack, scaled_stack_impl);

Tensor batch() {
  auto x = torch::arange(12 * width).remainder(17).sub(8);
  return x.view({12, width}) / 8.0;
}

/// What pp_rank 0 saw of a step.
struct seen_step {
  bool replayed = false;
  std::string ran_again;
  double loss = 0;
  std::map<std::string, Tensor> gradients; // of training steps
};

/// @param kinds of the steps: 't' for training, 'e' for evaluation
std::vector<seen_step> run(const virtual_world_options& world, uint64_t ranks,
                           const std::string& kinds) {
  std::vector<seen_step> result;
  run_virtual_world(ranks, world, [&](session& s) {
    distributed_model model{
      seeded([&] { return scaled_stack{static_cast<uint32_t>(ranks)}; })};
    auto train_step = step([&](Tensor x) {
      auto loss = model(x);
      model.backward(loss);
      return loss;
    });
    auto eval_step = step([&](Tensor x) {
      torch::NoGradGuard no_grad;
      return model(x);
    });
    model.partition();
    for (auto kind : kinds) {
      for (auto& p : model->parameters())
        p.mutable_grad() = Tensor{};
      model->train(kind == 't');
      auto out = kind == 't' ? train_step(batch()) : eval_step(batch());
      seen_step x;
      x.loss = out.reduce_mean().item<double>();
      x.replayed = s.last_step().replayed;
      x.ran_again = s.last_step().ran_again;
      auto gradients = model.gradients();
      x.gradients = {gradients.begin(), gradients.end()};
      if (s.rank() == 0)
        result.push_back(std::move(x));
    }
    if (s.rank() == 0 && model.order_text() != "")
      throw std::runtime_error{"ordered: " + model.order_text()};
  });
  return result;
}

/// The same in one process.
seen_step plain(uint64_t ranks) {
  auto model = seeded(
    [&] { return scaled_stack{static_cast<uint32_t>(ranks)}; });
  seen_step result;
  for (auto& part : batch().chunk(microbatches)) {
    auto x = part;
    for (auto& block : model->blocks)
      x = block->forward(x);
    auto loss = x.pow(2).mean() / static_cast<double>(microbatches);
    loss.backward();
    result.loss += loss.item<double>();
  }
  for (auto& p : model->named_parameters())
    result.gradients[p.key()] = p.value().grad();
  return result;
}

void check_steps(const std::vector<seen_step>& steps, const std::string& kinds,
                 uint64_t ranks) {
  auto expected = plain(ranks);
  for (size_t i = 0; i < kinds.size(); ++i) {
    INFO("step " << i + 1);
    CHECK(steps[i].ran_again.empty());
    CHECK(std::abs(steps[i].loss - expected.loss) < 1e-5 * expected.loss);
    for (auto& [name, y] : expected.gradients) {
      INFO(name);
      if (kinds[i] == 't')
        CHECK((steps[i].gradients.at(name) - y).abs().max().item<double>()
              <= 1e-5 * y.abs().max().item<double>() + 1e-7);
    }
  }
}

std::vector<bool> replays(const std::vector<seen_step>& steps) {
  std::vector<bool> result;
  for (auto& x : steps)
    result.push_back(x.replayed);
  return result;
}

struct mode {
  bool fixed_order = false;
  bool static_mode = true;
  // A call that learns is not recorded.
  std::optional<bool> fast = false;
};

virtual_world_options static_world(uint64_t ranks, mode m) {
  auto result = manual_world(ranks, microbatches);
  result.config.static_mode = m.static_mode;
  if (m.static_mode && !m.fixed_order)
    result.config.static_steps = 1;
  result.config.deterministic_server = m.fixed_order;
  result.config.fast_mode = m.fast;
  return result;
}

/// All that replay steps by default.
std::vector<mode> default_modes() {
  return {{false, true, std::nullopt},
          {true, false, std::nullopt},
          {true, true, std::nullopt}};
}

} // namespace

TEST_CASE(
  "the step in which modules are released from their order is not "
  "replayed",
  "[runtime][static][deterministic][R19][R33]") {
  auto ranks = GENERATE(2u, 4u);
  auto fixed_order = GENERATE(true, false);
  DYNAMIC_SECTION(ranks << " ranks, " << (fixed_order ? "fixed" : "free")
                        << " order") {
    auto world = static_world(ranks, {.fixed_order = fixed_order});
    world.seed = GENERATE(1u, 2u);
    auto steps = run(world, ranks, "ttttt");
    check_steps(steps, "ttttt", ranks);
    CHECK(replays(steps) == std::vector<bool>{false, false, true, true, true});
  }
}

TEST_CASE("evaluations that were recorded before the release are so again",
          "[runtime][static][deterministic][R19][R33]") {
  auto fixed_order = GENERATE(true, false);
  auto world = static_world(2, {.fixed_order = fixed_order});
  auto steps = run(world, 2, "eettteeett");
  check_steps(steps, "eettteeett", 2);
  CHECK(replays(steps)
        == std::vector<bool>{false, true, false, false, true, false, true, true,
                             true, true});
}

TEST_CASE("modules that were released are replayed by default",
          "[runtime][static][deterministic][fast][auto][R19][R33]") {
  // Released in the first step; the next one learns what calls return, and the
  // third one, perhaps, what their caller takes.
  constexpr auto kinds = "tttttt";
  for (auto ranks : {2u, 4u})
    for (auto& m : default_modes()) {
      CAPTURE(ranks, m.static_mode, m.fixed_order);
      auto steps = run(static_world(ranks, m), ranks, kinds);
      check_steps(steps, kinds, ranks);
      for (size_t i : {0, 1, 2})
        CHECK_FALSE(steps[i].replayed);
      for (size_t i : {4, 5})
        CHECK(steps[i].replayed);
    }
}

TEST_CASE("evaluations are replayed before and after the release by default",
          "[runtime][static][deterministic][fast][auto][R19][R33]") {
  constexpr auto kinds = "eeeettttteeeet";
  for (auto& m : default_modes()) {
    CAPTURE(m.static_mode, m.fixed_order);
    auto steps = run(static_world(2, m), 2, kinds);
    check_steps(steps, kinds, 2);
    for (size_t i : {0, 4, 5})
      CHECK_FALSE(steps[i].replayed);
    for (size_t i : {8, 12, 13})
      CHECK(steps[i].replayed);
  }
}

TEST_CASE("fast mode goes on with modules that were released",
          "[runtime][fast][R19]") {
  auto ranks = GENERATE(2u, 4u);
  auto world = manual_world(ranks, microbatches);
  world.config.fast_mode = true;
  check_steps(run(world, ranks, "ettett"), "ettett", ranks);
}
