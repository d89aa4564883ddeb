// ctest: seconds=12
#include "tests/support/catch.hpp"

#include "runtime/train/models/gpt.hpp"
#include "smp/nn.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/torch/numbers.hpp"
#include "tests/support/torch/two_ranks.hpp"

#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/transformerlayer.h>
#include <torch/utils.h>

#include <map>
#include <mutex>
#include <string>
#include <vector>

// The paper's transformers (smp.nn): against layers of LibTorch and the model
// of the quickstart, and shared by ranks against replicas that share nothing.

using namespace smp;
using namespace smp::test;
using Catch::Matchers::ContainsSubstring;

namespace {

constexpr int64_t heads = 4;
constexpr int64_t width = 24;
constexpr int64_t inner = 40;
constexpr int64_t words = 37;
constexpr int64_t samples = 3;
constexpr int64_t tokens = 5;
constexpr int64_t seen = 7; // of what is attended to

nn::transformer_lm_head_arguments small() {
  nn::transformer_lm_head_arguments x;
  x.num_attention_heads = heads;
  x.attention_head_size = width / heads;
  x.hidden_size = width;
  x.intermediate_size = inner;
  x.num_layers = 2;
  x.vocab_size = words;
  x.num_positions = 16;
  x.attention_dropout_prob = x.hidden_dropout_prob = 0;
  return x;
}

/// Gives a parameter of LibTorch's layer to one of smp.
void assign(const Tensor& from, const Tensor& to) {
  torch::NoGradGuard no_grad;
  REQUIRE(from.sizes() == to.sizes());
  to.copy_(from);
}

template <class L>
void copy_linear(const L& from, torch::nn::LinearImpl& to) {
  assign(from->weight, to.weight);
  assign(from->bias, to.bias);
}

void copy_norm(torch::nn::LayerNormImpl& from, torch::nn::LayerNormImpl& to) {
  torch::NoGradGuard no_grad;
  // Else all norms begin alike.
  from.weight.normal_(1, 0.2);
  from.bias.normal_(0, 0.2);
  assign(from.weight, to.weight);
  assign(from.bias, to.bias);
}

void copy_attention(torch::nn::MultiheadAttentionImpl& from,
                    nn::distributed_attention_layer_impl& to) {
  {
    torch::NoGradGuard no_grad;
    from.in_proj_bias.normal_();
    from.out_proj->bias.normal_();
  }
  auto weights = from.in_proj_weight.chunk(3);
  auto biases = from.in_proj_bias.chunk(3);
  auto parts = {to.query, to.key, to.value};
  for (size_t i = 0; auto& x : parts) {
    assign(weights[i], x->weight);
    assign(biases[i++], x->bias);
  }
  copy_linear(from.out_proj, *to.dense);
}

/// What a loss of `y` gives to inputs and to parameters, by name.
numbers gradients_of(torch::nn::Module& x, const Tensor& y,
                     const std::vector<Tensor>& inputs) {
  auto weights = torch::linspace(-1, 1, y.numel()).view(y.sizes());
  (y * weights).sum().backward();
  numbers result;
  for (auto& p : x.named_parameters())
    if (p.value().grad().defined())
      result.emplace(p.key(), p.value().grad());
  for (size_t i = 0; i < inputs.size(); ++i)
    result.emplace("input" + std::to_string(i), inputs[i].grad());
  return result;
}

/// Of layers of LibTorch, under the names of those of smp. @param parts names
/// of norms, attentions and linears, theirs and ours
numbers renamed(const numbers& xs,
                const std::vector<std::pair<std::string, std::string>>& parts) {
  numbers result;
  for (auto& [name, x] : xs) {
    auto to = name;
    auto is_attention = false;
    for (auto& [theirs, ours] : parts)
      if (name.starts_with(theirs + ".")) {
        to = ours + name.substr(theirs.size());
        is_attention = theirs.ends_with("attn");
      }
    if (!is_attention) {
      result.emplace(to, x);
      continue;
    }
    auto dot = to.find('.');
    auto whose = to.substr(0, dot), what = to.substr(dot + 1);
    if (what.starts_with("out_proj")) {
      result.emplace(whose + ".dense" + what.substr(8), x);
      continue;
    }
    auto kind = what.substr(8); // of in_proj_weight
    for (size_t i = 0; auto* part : {"query", "key", "value"})
      result.emplace(whose + "." + part + "." + kind, x.chunk(3)[i++]);
  }
  return result;
}

/// As LibTorch has it: [T, B, C].
Tensor by_tokens(const Tensor& x) {
  return x.transpose(0, 1);
}

Tensor leaf(at::IntArrayRef sizes) {
  return torch::randn(sizes).requires_grad_();
}

Tensor same(const Tensor& x) {
  return x.detach().clone().requires_grad_();
}

} // namespace

// -- numbers ------------------------------------------------------------------

TEST_CASE("a layer computes what LibTorch's encoder layer does",
          "[runtime][nn]") {
  auto relu = GENERATE(true, false);
  auto masked = GENERATE(true, false);
  auto causal = GENERATE(true, false);
  CAPTURE(relu, masked, causal);
  auto options = torch::nn::TransformerEncoderLayerOptions(width, heads)
                   .dim_feedforward(inner)
                   .dropout(0);
  if (relu)
    options.activation(torch::kReLU);
  else
    options.activation(torch::kGELU);
  torch::nn::TransformerEncoderLayer theirs{options};
  nn::transformer_layer_arguments arguments = small();
  arguments.activation = relu ? "relu" : "gelu";
  if (causal)
    arguments.causal_mask_size = tokens;
  nn::distributed_transformer_layer mine{arguments};
  copy_attention(*theirs->self_attn, *mine->attention);
  copy_linear(theirs->linear1, *mine->output->dense1);
  copy_linear(theirs->linear2, *mine->output->dense2);
  copy_norm(*theirs->norm1, *mine->attention->layernorm);
  copy_norm(*theirs->norm2, *mine->output->layernorm);

  auto x = leaf({samples, tokens, width}), y = same(x);
  auto padding = torch::zeros({samples, tokens}, torch::kBool);
  if (masked)
    padding.narrow(1, tokens - 2, 2).narrow(0, 1, 2).fill_(true);
  auto later = causal ? causal_bias(tokens).view({tokens, tokens})
                      : torch::zeros({tokens, tokens});
  auto expected = by_tokens(theirs(by_tokens(x), later, padding));
  nn::layer_states states{y};
  if (masked)
    states.push_back(padding.logical_not().view({samples, 1, 1, tokens}));
  auto result = mine(states).at(0);
  check_near({{"result", result.detach()}}, {{"result", expected.detach()}});
  check_near(gradients_of(*mine, result, {y}),
             renamed(gradients_of(*theirs, expected, {x}),
                     {{"self_attn", "attention"},
                      {"linear1", "output.dense1"},
                      {"linear2", "output.dense2"},
                      {"norm1", "attention.layernorm"},
                      {"norm2", "output.layernorm"}}),
             {.least = 1e-5});
}

TEST_CASE(
  "a layer with cross-attention computes what LibTorch's decoder layer "
  "does",
  "[runtime][nn]") {
  torch::nn::TransformerDecoderLayer theirs{
    torch::nn::TransformerDecoderLayerOptions(width, heads)
      .dim_feedforward(inner)
      .dropout(0)
      .activation(torch::kGELU)};
  nn::transformer_layer_arguments arguments = small();
  arguments.causal_mask_size = tokens;
  arguments.add_cross_attention = true;
  nn::distributed_transformer_layer mine{arguments};
  copy_attention(*theirs->self_attn, *mine->attention);
  copy_attention(*theirs->multihead_attn, *mine->crossattention);
  copy_linear(theirs->linear1, *mine->output->dense1);
  copy_linear(theirs->linear2, *mine->output->dense2);
  copy_norm(*theirs->norm1, *mine->attention->layernorm);
  copy_norm(*theirs->norm2, *mine->crossattention->layernorm);
  copy_norm(*theirs->norm3, *mine->output->layernorm);

  auto x = leaf({samples, tokens, width}), y = same(x);
  auto context = leaf({samples, seen, width}), shown = same(context);
  auto padding = torch::zeros({samples, seen}, torch::kBool);
  padding.narrow(1, 4, 3).narrow(0, 0, 1).fill_(true);
  auto expected = by_tokens(theirs(by_tokens(x), by_tokens(context),
                                   causal_bias(tokens).view({tokens, tokens}),
                                   Tensor{}, Tensor{}, padding));
  auto result = mine(nn::layer_states{
                       y, torch::zeros({1, 1, 1, tokens}), shown,
                       padding.logical_not().view({samples, 1, 1, seen})})
                  .at(0);
  check_near({{"result", result.detach()}}, {{"result", expected.detach()}});
  check_near(gradients_of(*mine, result, {y, shown}),
             renamed(gradients_of(*theirs, expected, {x, context}),
                     {{"self_attn", "attention"},
                      {"multihead_attn", "crossattention"},
                      {"linear1", "output.dense1"},
                      {"linear2", "output.dense2"},
                      {"norm1", "attention.layernorm"},
                      {"norm2", "crossattention.layernorm"},
                      {"norm3", "output.layernorm"}}),
             {.least = 1e-5});
}

TEST_CASE("with the arguments of GPT-2 it is the quickstart's model",
          "[runtime][nn]") {
  auto arguments = small();
  arguments.causal_mask_size = arguments.num_positions;
  arguments.pre_layernorm = true;
  arguments.post_layernorm = false;
  arguments.activation = "gelu_new";
  nn::distributed_transformer_lm_head mine{arguments};
  model_sizes sizes;
  sizes.vocabulary = words;
  sizes.sequence_length = arguments.num_positions;
  sizes.layers = arguments.num_layers;
  sizes.heads = heads;
  sizes.width = width;
  sizes.feed_forward = inner;
  sizes.tied = true;
  gpt theirs{sizes};
  assign(theirs->transformer->wte->weight, mine->word_embedding->weight);
  assign(theirs->transformer->wpe->weight, mine->position_embedding->weight);
  copy_norm(*theirs->transformer->ln_f, *mine->layernorm);
  for (size_t i = 0; i < 2; ++i) {
    auto& from = theirs->transformer->h->at<gpt_block_impl>(i);
    auto& to = mine->transformer->seq_layers
                 ->at<nn::distributed_transformer_layer_impl>(i);
    auto weights = from.attn->c_attn->weight.chunk(3, 1);
    auto parts = {to.attention->query, to.attention->key, to.attention->value};
    for (size_t k = 0; auto& x : parts) {
      assign(weights[k++].t(), x->weight);
      torch::NoGradGuard no_grad;
      x->bias.zero_();
    }
    auto linear = [](conv1d_impl& a, torch::nn::LinearImpl& b) {
      assign(a.weight.t(), b.weight);
      assign(a.bias, b.bias);
    };
    linear(*from.attn->c_proj, *to.attention->dense);
    linear(*from.mlp->c_fc, *to.output->dense1);
    linear(*from.mlp->c_proj, *to.output->dense2);
    copy_norm(*from.ln_1, *to.attention->layernorm);
    copy_norm(*from.ln_2, *to.output->layernorm);
  }
  auto text = torch::arange(samples * tokens).view({samples, tokens}) * 5
              % words;
  auto result = mine(text), expected = theirs(text);
  check_near({{"scores", result.detach()}}, {{"scores", expected.detach()}});
  result.sin().sum().backward();
  expected.sin().sum().backward();
  check_near({{"words", mine->word_embedding->weight.grad()}},
             {{"words", theirs->transformer->wte->weight.grad()}});
}

// -- shared -------------------------------------------------------------------

namespace {

struct grid {
  uint64_t tensor = 1;
  uint64_t pipeline = 1;
  std::string optimize = "memory";
  bool same_samples = false;
  uint64_t replicas = 2;
};

struct training {
  std::vector<numbers> gradients;
  std::string text;
};

/// Replicas that share layers or nothing: their random streams are the same.
training train(const grid& x, const nn::transformer_lm_head_arguments& sizes) {
  training result;
  std::mutex mutex;
  virtual_world_options world;
  world.reorder = true;
  auto& config = world.config;
  config.pipeline_parallel_degree = x.pipeline;
  config.tensor_parallel_degree = x.tensor;
  config.optimize = x.optimize;
  config.prescaled_batch = x.same_samples;
  config.ddp = true;
  config.microbatches = 2;
  config.threads = 1;
  run_virtual_world(x.replicas * x.pipeline, world, [&](session& s) {
    distributed_model model{
      seeded([&] { return nn::distributed_transformer_lm_head{sizes}; })};
    auto train_step = step([&](Tensor text, Tensor mask, Tensor context) {
      auto scores = sizes.add_cross_attention
                      ? model(text, mask, text % 2, context)
                      : model(text, mask, text % 2);
      auto labels = (text * 3 + 1) % words;
      auto loss = scores.square().mean()
                  + (sizes.add_cross_attention
                       ? model->loss(text, labels, mask, text % 2, context)
                       : model->loss(text, labels, mask, text % 2));
      model.backward(loss);
      return loss;
    });
    for (int64_t i = 0; i < 2; ++i) {
      model->zero_grad();
      constexpr int64_t rows = 8;
      auto mine = [](const Tensor& y) {
        return y.chunk(static_cast<int64_t>(data_size()))
          .at(static_cast<size_t>(data_rank()));
      };
      auto text = (torch::arange(rows * tokens).view({rows, tokens}) * 7 + i)
                  % words;
      auto mask = torch::ones({rows, tokens}, torch::kLong);
      mask.narrow(1, tokens - 1, 1).narrow(0, 1, rows / 2).zero_();
      auto context = torch::linspace(-1, 1, rows * seen * width)
                       .view({rows, seen, width})
                       .sin();
      train_step(mine(text), mine(mask), mine(context));
      auto gradients = model.gradients();
      std::unique_lock guard{mutex};
      if (s.rank() == 0)
        result.gradients.emplace_back(gradients.begin(), gradients.end());
    }
    std::unique_lock guard{mutex};
    if (s.rank() == 0)
      result.text = model.partition_text();
  });
  return result;
}

void check_same(const nn::transformer_lm_head_arguments& sizes,
                bool same_samples = false, uint64_t tensor = 2) {
  auto expected = train({.replicas = same_samples ? 1 : tensor}, sizes);
  auto by = " shared by " + std::to_string(tensor) + " ranks ";
  for (auto optimize : {"memory", "speed"})
    for (uint64_t pipeline : {1, 2}) {
      CAPTURE(optimize, pipeline, same_samples);
      auto mine = train({tensor, pipeline, optimize, same_samples, tensor},
                        sizes);
      for (auto& what :
           {"TransformerLayer" + by + "for " + optimize,
            "LMHead" + by + "by words", "Embedding" + by + "by rows"})
        CHECK_THAT(mine.text, ContainsSubstring(what));
      REQUIRE(mine.gradients.size() == expected.gradients.size());
      for (size_t i = 0; i < expected.gradients.size(); ++i)
        check_near(mine.gradients[i], expected.gradients[i]);
    }
}

} // namespace

TEST_CASE("ranks share the layers of a language model without being told",
          "[runtime][nn]") {
  auto dropout = GENERATE(0.0, 0.2);
  auto pre = GENERATE(true, false);
  auto cross = GENERATE(true, false);
  CAPTURE(dropout, pre, cross);
  auto sizes = small();
  sizes.attention_head_size = 8; // together not as wide as hidden states
  sizes.attention_dropout_prob = sizes.hidden_dropout_prob = dropout;
  sizes.pre_layernorm = pre;
  sizes.post_layernorm = !pre;
  sizes.causal_mask_size = 16;
  sizes.add_cross_attention = cross;
  sizes.num_token_types = 2;
  sizes.use_normal_initialization = true;
  sizes.initializer_range = 0.2;
  check_same(sizes);
}

TEST_CASE("four ranks share the layers of a language model", "[runtime][nn]") {
  auto sizes = small();
  sizes.attention_dropout_prob = sizes.hidden_dropout_prob = 0.2;
  sizes.causal_mask_size = 16;
  sizes.num_token_types = 2;
  sizes.use_normal_initialization = true;
  sizes.initializer_range = 0.2;
  check_same(sizes, false, 4);
}

TEST_CASE("ranks share layers with norms on both sides and with none",
          "[runtime][nn]") {
  auto both = GENERATE(true, false);
  CAPTURE(both);
  auto sizes = small();
  sizes.pre_layernorm = sizes.post_layernorm = both;
  sizes.causal_mask_size = 16;
  sizes.add_cross_attention = true;
  sizes.num_token_types = 2;
  sizes.use_normal_initialization = true;
  sizes.initializer_range = 0.2;
  check_same(sizes);
}

TEST_CASE("ranks with the same samples share the layers of a language model",
          "[runtime][nn][R58]") {
  auto cross = GENERATE(true, false);
  CAPTURE(cross);
  auto sizes = small();
  sizes.attention_dropout_prob = sizes.hidden_dropout_prob = 0.2;
  sizes.causal_mask_size = 16;
  sizes.add_cross_attention = cross;
  sizes.num_token_types = 2;
  sizes.use_normal_initialization = true;
  sizes.initializer_range = 0.2;
  check_same(sizes, true);
}

TEST_CASE("the rest of layers is shared whose heads do not divide",
          "[runtime][nn]") {
  auto sizes = small();
  sizes.num_attention_heads = 3;
  sizes.attention_head_size = 8;
  sizes.num_token_types = 2;
  auto expected = train({}, sizes);
  auto mine = train({2}, sizes);
  for (auto* what :
       {"TransformerLayer not shared, as", "AttentionLayer not shared, as",
        "TransformerOutputLayer shared by 2", "Linear shared by 2 ranks"})
    CHECK_THAT(mine.text, ContainsSubstring(what));
  for (size_t i = 0; i < expected.gradients.size(); ++i)
    check_near(mine.gradients[i], expected.gradients[i]);
}

// -- bad input ----------------------------------------------------------------

TEST_CASE("arguments that make no sense are named", "[runtime][nn]") {
  auto error_with = [](auto change) {
    auto x = small();
    change(x);
    return error_of([&] { nn::distributed_transformer_lm_head{x}; });
  };
  CHECK_THAT(error_with([](auto& x) { x.activation = "swish"; }),
             ContainsSubstring("activation = \"swish\" is not known; allowed: "
                               "\"gelu\""));
  CHECK_THAT(error_with([](auto& x) { x.num_attention_heads = 0; }),
             ContainsSubstring("num_attention_heads is 0"));
  CHECK_THAT(error_with([](auto& x) { x.hidden_dropout_prob = 1; }),
             ContainsSubstring("hidden_dropout_prob is 1"));
  CHECK_THAT(error_with([](auto& x) { x.num_layers = 0; }),
             ContainsSubstring("num_layers is 0"));
  CHECK_THAT(error_with([](auto& x) { x.causal_mask_size = -1; }),
             ContainsSubstring("causal_mask_size is -1"));
  CHECK_THAT(error_with([](auto& x) { x.num_token_types = -1; }),
             ContainsSubstring("num_token_types is -1"));
}

TEST_CASE("the loss of a model is that of its scores", "[runtime][nn]") {
  nn::distributed_transformer_lm_head model{small()};
  auto text = torch::arange(samples * tokens).view({samples, tokens}) * 5
              % words;
  auto labels = (text + 2) % words;
  labels.select(0, 0).fill_(-100); // these do not count
  auto expected = torch::nn::functional::cross_entropy(
    model(text).flatten(0, 1), labels.flatten());
  check_near({{"loss", model->loss(text, labels).detach()}},
             {{"loss", expected.detach()}});
}

TEST_CASE("what a transformer cannot take is named", "[runtime][nn]") {
  auto arguments = small();
  arguments.causal_mask_size = 4;
  nn::distributed_transformer_lm_head model{arguments};
  auto text = [](int64_t n) { return torch::zeros({1, n}, torch::kLong); };
  CHECK_THAT(error_of([&] { model(text(5)); }),
             ContainsSubstring("a sequence of 5 tokens, but causal_mask_size "
                               "is 4"));
  CHECK_THAT(error_of([&] { model(text(17)); }),
             ContainsSubstring("a sequence of 17 tokens, but num_positions is "
                               "16"));
  nn::distributed_transformer_layer alone{arguments};
  auto hidden = torch::ones({1, 5, width});
  for (auto& told :
       {error_of([&] { alone(nn::layer_states{hidden}); }),
        error_of([&] { alone->attention(hidden, hidden, Tensor{}); })})
    CHECK_THAT(told, ContainsSubstring("a sequence of 5 tokens, but "
                                       "causal_mask_size is 4"));
  auto body = small();
  body.add_lm_head = false;
  nn::distributed_transformer_lm_head without{body};
  CHECK(without(text(3)).sizes() == at::IntArrayRef{1, 3, width});
  CHECK_THAT(error_of([&] { without->loss(text(3), text(3)); }),
             ContainsSubstring("add_lm_head is false"));
  arguments.add_cross_attention = true;
  nn::distributed_transformer_lm_head decoder{arguments};
  CHECK_THAT(error_of([&] { decoder(text(4)); }),
             ContainsSubstring("nothing was given to attend to"));
  nn::distributed_transformer_layer layer{arguments};
  CHECK_THAT(error_of([&] {
               layer(nn::layer_states{torch::ones({1, 2, 24})});
             }),
             ContainsSubstring("it got 1 tensors"));
}
