#include "tests/support/catch.hpp"

#include "runtime/intercept/call_observer.hpp"
#include "smp/nn.hpp"
#include "tests/support/torch/numbers.hpp"
#include "tests/support/torch/two_ranks.hpp"

#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/utils.h>

#include <cstdint>
#include <mutex>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

// What layers behind each other exchange once: what they attend to, and hidden
// states that nobody sees.

using namespace smp;
using namespace smp::test;

namespace {

constexpr int64_t rows = 4; // of two ranks
constexpr int64_t width = 64;

/// @returns what rank 0 sends in a step
double sent_with(int64_t layers, int64_t seen, bool again) {
  nn::transformer_lm_head_arguments sizes;
  sizes.num_attention_heads = 2;
  sizes.attention_head_size = width / 2;
  sizes.hidden_size = sizes.intermediate_size = width;
  sizes.num_layers = layers;
  sizes.vocab_size = 32;
  sizes.num_positions = 4;
  sizes.attention_dropout_prob = sizes.hidden_dropout_prob = 0;
  sizes.add_cross_attention = true;
  virtual_world_options world;
  world.config.tensor_parallel_degree = 2;
  world.config.optimize = "speed"; // linears of a context send nothing
  world.config.ddp = true;
  world.config.microbatches = 1;
  world.config.threads = 1;
  if (again) {
    auto& how = world.config.activation_checkpointing;
    how.modules = {"transformer.seq_layers"};
    how.strategy = "contiguous";
  }
  double result = 0;
  run_virtual_world(2, world, [&](session& s) {
    distributed_model model{
      seeded([&] { return nn::distributed_transformer_lm_head{sizes}; })};
    auto train_step = step([&](Tensor text, Tensor context) {
      auto mask = torch::ones_like(text);
      auto leaf = context.detach().clone().requires_grad_();
      auto loss = model->loss(text, text, mask, mask, leaf.sin());
      model.backward(loss);
      return loss;
    });
    train_step(torch::ones({rows / 2, 4}, torch::kLong),
               torch::ones({rows / 2, seen, width}));
    if (s.rank() == 0)
      result = static_cast<double>(s.last_step().bytes_sent);
  });
  return result;
}

} // namespace

TEST_CASE("a context reaches peers once for all layers of a decoder",
          "[runtime][nn][R50]") {
  auto again = GENERATE(false, true);
  auto layers = GENERATE(1, 3);
  CAPTURE(again, layers);
  constexpr int64_t few = 8, many = 264;
  auto grown = sent_with(layers, many, again) - sent_with(layers, few, again);
  // float32 to the other rank, and gradients back; what is computed again
  // travels again.
  auto once = 4.0 * (rows / 2) * (many - few) * width;
  CHECK(grown == Catch::Approx((again ? 3 : 2) * once).epsilon(0.05));
}

namespace {

/// The layers of a distributed_transformer, called by the code of a user.
struct own_layers_impl : torch::nn::Module {
  explicit own_layers_impl(const nn::transformer_arguments& x) {
    for (int64_t i = 0; i < x.num_layers; ++i)
      seq_layers->push_back(nn::distributed_transformer_layer(x));
    register_module("seq_layers", seq_layers);
  }

  nn::layer_states forward(nn::layer_states x) {
    return seq_layers->forward<nn::layer_states>(std::move(x));
  }

  torch::nn::Sequential seq_layers;
};
TORCH_MODULE_IMPL(own_layers, own_layers_impl);

struct doubled_impl : torch::nn::Module {
  nn::layer_states forward(nn::layer_states x) {
    x.at(0) = x.at(0) * 2;
    return x;
  }
};
TORCH_MODULE_IMPL(doubled, doubled_impl);

/// The same with something else before the last one.
struct mixed_layers_impl : torch::nn::Module {
  explicit mixed_layers_impl(const nn::transformer_arguments& x) {
    for (int64_t i = 0; i < x.num_layers; ++i) {
      if (i + 1 == x.num_layers)
        seq_layers->push_back(doubled());
      seq_layers->push_back(nn::distributed_transformer_layer(x));
    }
    register_module("seq_layers", seq_layers);
  }

  nn::layer_states forward(nn::layer_states x) {
    return seq_layers->forward<nn::layer_states>(std::move(x));
  }

  torch::nn::Sequential seq_layers;
};
TORCH_MODULE_IMPL(mixed_layers, mixed_layers_impl);

template <class Layers>
struct tower_impl : torch::nn::Module {
  explicit tower_impl(const nn::transformer_arguments& x) : layers(x) {
    register_module("in", in);
    register_module("layers", layers);
  }

  Tensor forward(Tensor x) {
    return layers->forward(nn::layer_states{in(x)}).at(0);
  }

  torch::nn::Linear in{width, width};
  Layers layers;
};

struct own_tower_impl : tower_impl<own_layers> {
  using tower_impl<own_layers>::tower_impl;
};
TORCH_MODULE_IMPL(own_tower, own_tower_impl);

struct mixed_tower_impl : tower_impl<mixed_layers> {
  using tower_impl<mixed_layers>::tower_impl;
};
TORCH_MODULE_IMPL(mixed_tower, mixed_tower_impl);

struct smp_tower_impl : tower_impl<nn::distributed_transformer> {
  using tower_impl<nn::distributed_transformer>::tower_impl;
};
TORCH_MODULE_IMPL(smp_tower, smp_tower_impl);

constexpr int64_t tower_layers = 3, tower_tokens = 64;

/// Bytes of hidden states that one of two ranks sends to the other.
constexpr double half_of_states = 4.0 * (rows / 2) * tower_tokens * width / 2;

/// Notes the sizes of what modules return.
class noting final : public call_observer {
public:
  void begin(const void*, std::span<const at::Tensor>) override {
    // nop
  }

  void end(const void*, std::span<const at::Tensor> xs) override {
    for (auto& x : xs)
      sizes.insert(x.sizes().vec());
  }

  void fail(const void*) override {
    // nop
  }

  void body_done(std::span<const at::Tensor>,
                 std::span<const at::Tensor>) override {
    // nop
  }

  void take_back() override {
    // nop
  }

  std::set<std::vector<int64_t>> sizes;
};

struct tower_case {
  uint64_t peers = 2; // or replicas
  uint64_t pipeline = 1;
  double dropout = 0;
  std::string again = {}; // the strategy if layers are computed again
  bool shares = true;
  bool pinned = false; // layers are on the last rank of the pipeline
  bool observed = false;

  session_config config() const {
    session_config x;
    x.tensor_parallel_degree = shares ? peers : 1;
    x.pipeline_parallel_degree = pipeline;
    x.optimize = "memory";
    x.ddp = true;
    x.microbatches = 1;
    x.threads = 1;
    if (!again.empty()) {
      x.activation_checkpointing.modules = {"layers.seq_layers"};
      x.activation_checkpointing.strategy = again;
    }
    return x;
  }

  nn::transformer_arguments sizes() const {
    nn::transformer_arguments x;
    x.num_layers = tower_layers;
    x.num_attention_heads = 4;
    x.attention_head_size = width / 4;
    x.hidden_size = x.intermediate_size = width;
    x.attention_dropout_prob = x.hidden_dropout_prob = dropout;
    return x;
  }
};

/// Of rank 0.
struct tower_step {
  double sent = 0;
  numbers gradients;
  std::set<std::vector<int64_t>> sizes;
};

template <class Tower>
tower_step step_of(const tower_case& c) {
  virtual_world_options world;
  world.config = c.config();
  tower_step result;
  std::mutex mutex;
  run_virtual_world(c.peers * c.pipeline, world, [&](session& s) {
    distributed_model model{seeded([&] { return Tower{c.sizes()}; })};
    if (c.pinned)
      set_partition(*model->layers->seq_layers,
                    static_cast<uint32_t>(c.pipeline - 1));
    noting looks;
    if (c.observed)
      s.internals().observe(&looks);
    auto train_step = step([&](Tensor x) {
      auto loss = model(x).sin().mean();
      model.backward(loss);
      return loss;
    });
    auto x = torch::linspace(-1, 1, rows * tower_tokens * width)
               .view({rows, tower_tokens, width})
               .sin();
    train_step(x.chunk(static_cast<int64_t>(c.peers)).at(dp_rank()));
    s.internals().observe(nullptr);
    auto sent = static_cast<double>(s.last_step().bytes_sent);
    auto gradients = model.gradients();
    std::unique_lock guard{mutex};
    if (s.rank() == 0)
      result = {sent, {gradients.begin(), gradients.end()}, looks.sizes};
  });
  return result;
}

/// @returns what `c` gives, with the gradients of replicas that share nothing
template <class Tower>
tower_step checked_step_of(const tower_case& c) {
  auto apart = step_of<Tower>(
    {.peers = c.peers, .dropout = c.dropout, .shares = false});
  auto result = step_of<Tower>(c);
  REQUIRE(!result.gradients.empty());
  check_near(result.gradients, apart.gradients, {.least = 1e-6});
  return result;
}

} // namespace

TEST_CASE("the layers of a transformer hand hidden states to each other",
          "[runtime][nn][R50]") {
  auto mine = checked_step_of<smp_tower>({});
  auto own = checked_step_of<own_tower>({});
  // Between two layers nothing travels, rather than four times the half.
  constexpr auto saved = (tower_layers - 1) * 4 * half_of_states;
  CHECK(own.sent - mine.sent == Catch::Approx(saved).epsilon(0.05));
}

TEST_CASE("layers that hand on hidden states compute what they would apart",
          "[runtime][nn][R50][R54]") {
  uint64_t peers = GENERATE(2, 4);
  uint64_t pipeline = GENERATE(1, 2);
  auto dropout = GENERATE(0.0, 0.2);
  std::string again = GENERATE("", "contiguous", "group_2");
  if (peers + pipeline == 6)
    return;
  CAPTURE(peers, pipeline, dropout, again);
  checked_step_of<smp_tower>(
    {.peers = peers, .pipeline = pipeline, .dropout = dropout, .again = again});
}

TEST_CASE("layers that are computed again together exchange nothing between",
          "[runtime][nn][R50][R52]") {
  auto each = checked_step_of<smp_tower>({.again = "each"});
  auto together = checked_step_of<smp_tower>({.again = "contiguous"});
  // There and back once in forward, again and in backward.
  constexpr auto saved = (tower_layers - 1) * 6 * half_of_states;
  CHECK(each.sent - together.sent == Catch::Approx(saved).epsilon(0.05));
}

TEST_CASE("an observer of calls sees the hidden states of own samples",
          "[runtime][nn][R50]") {
  auto looked_at = checked_step_of<smp_tower>({.observed = true});
  CHECK(looked_at.sizes
        == std::set<std::vector<int64_t>>{{rows / 2, tower_tokens, width}});
  auto own = step_of<own_tower>({});
  CHECK(looked_at.sent == Catch::Approx(own.sent).epsilon(0.01));
}

TEST_CASE("what stands between layers gets the hidden states of own samples",
          "[runtime][nn][R50]") {
  // Here, or together as a range of another rank.
  auto pinned = GENERATE(false, true);
  CAPTURE(pinned);
  checked_step_of<mixed_tower>(
    {.pipeline = pinned ? 2u : 1u, .pinned = pinned});
}
