#include "tests/support/catch.hpp"

#include "runtime/train/models/gpt.hpp"

#include "transport/error.hpp"

#include <torch/torch.h>

#include <set>

using Catch::Matchers::ContainsSubstring;

namespace {

using state = std::map<std::string, torch::Tensor>;

const smp::model_sizes tiny{
  .vocabulary = 13, .sequence_length = 6, .layers = 2, .heads = 2, .width = 8};

state state_of(smp::gpt& model) {
  state result;
  for (auto& item : model->named_parameters())
    result[item.key()] = item.value().detach().to(torch::kDouble);
  return result;
}

// -- GPT-2 once more, in double precision, from its formulas ------------------

torch::Tensor scaled_norm(const state& s, const std::string& name,
                          torch::Tensor x) {
  auto centred = x - x.mean(-1, true);
  auto variance = (centred * centred).mean(-1, true);
  return centred / (variance + 1e-5).sqrt() * s.at(name + ".weight")
         + s.at(name + ".bias");
}

torch::Tensor affine(const state& s, const std::string& name, torch::Tensor x) {
  return torch::matmul(x, s.at(name + ".weight")) + s.at(name + ".bias");
}

torch::Tensor gelu_tanh(torch::Tensor x) {
  auto inner = std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x);
  return 0.5 * x * (1 + torch::tanh(inner));
}

/// x: [T, C], window: how many tokens are seen, 0: all before
torch::Tensor attention(const state& s, const std::string& name,
                        torch::Tensor x, int64_t heads, int64_t window) {
  const auto t = x.size(0), c = x.size(1), d = c / heads;
  auto qkv = affine(s, name + ".c_attn", x);
  std::vector<torch::Tensor> outputs;
  for (int64_t h = 0; h < heads; ++h) {
    auto part = [&](int64_t i) {
      return qkv.slice(1, i * c + h * d, i * c + (h + 1) * d);
    };
    auto scores = torch::matmul(part(0), part(1).t()) / std::sqrt(double(d));
    for (int64_t i = 0; i < t; ++i)
      for (int64_t j = 0; j < t; ++j)
        if (j > i || (window > 0 && j <= i - window))
          scores[i][j] = -INFINITY;
    auto weights = scores.exp();
    outputs.push_back(torch::matmul(weights / weights.sum(-1, true), part(2)));
  }
  return affine(s, name + ".c_proj", torch::cat(outputs, 1));
}

/// tokens: [T]
torch::Tensor reference(const state& s, torch::Tensor tokens,
                        const smp::model_sizes& cfg) {
  const auto t = tokens.size(0);
  auto x = s.at("transformer.wte.weight").index_select(0, tokens)
           + s.at("transformer.wpe.weight").slice(0, 0, t);
  for (int64_t i = 0; i < cfg.layers; ++i) {
    auto block = "transformer.h." + std::to_string(i);
    x = x
        + attention(s, block + ".attn", scaled_norm(s, block + ".ln_1", x),
                    cfg.heads, i % 2 == 1 ? cfg.window : 0);
    auto y = affine(s, block + ".mlp.c_fc", scaled_norm(s, block + ".ln_2", x));
    x = x + affine(s, block + ".mlp.c_proj", gelu_tanh(y));
  }
  x = scaled_norm(s, "transformer.ln_f", x);
  auto head = cfg.tied ? "transformer.wte.weight" : "lm_head.weight";
  return torch::matmul(x, s.at(head).t());
}

/// Weights large enough that every part matters in the result.
void randomise(smp::gpt& model) {
  torch::NoGradGuard guard;
  for (auto& p : model->parameters())
    p.normal_(0, 0.5);
}

} // namespace

TEST_CASE("The GPT computes the formulas of GPT-2 and of GPT-3",
          "[runtime][gpt]") {
  torch::manual_seed(1);
  auto cfg = tiny;
  cfg.tied = GENERATE(false, true);
  cfg.window = GENERATE(0, 1, 2, 4, 9);
  smp::gpt model{cfg};
  randomise(model);
  auto tokens = torch::randint(13, {3, 5}, torch::kLong);
  auto logits = model(tokens);
  REQUIRE(logits.sizes() == torch::IntArrayRef{3, 5, 13});
  auto s = state_of(model);
  for (int64_t b = 0; b < 3; ++b) {
    auto expected = reference(s, tokens[b], cfg);
    CHECK((logits[b] - expected).abs().max().item<double>()
          < 1e-4 * expected.abs().max().item<double>());
  }
}

TEST_CASE("A token changes no earlier logits", "[runtime][gpt]") {
  torch::manual_seed(2);
  smp::gpt model{tiny};
  randomise(model);
  auto a = torch::randint(12, {1, 6}, torch::kLong);
  auto b = a.clone();
  b[0][3] += 1;
  auto x = model(a), y = model(b);
  CHECK(torch::allclose(x.slice(1, 0, 3), y.slice(1, 0, 3)));
  CHECK_FALSE(torch::allclose(x.slice(1, 3), y.slice(1, 3)));
}

TEST_CASE("Parameters are called as in the GPT-2 of Hugging Face",
          "[runtime][gpt]") {
  smp::gpt model{tiny};
  std::map<std::string, std::vector<int64_t>> expected{
    {"transformer.wte.weight", {13, 8}}, {"transformer.wpe.weight", {6, 8}},
    {"transformer.ln_f.weight", {8}},    {"transformer.ln_f.bias", {8}},
    {"lm_head.weight", {13, 8}},
  };
  for (std::string i : {"0", "1"})
    for (auto& [name, sizes] : std::map<std::string, std::vector<int64_t>>{
           {"ln_1.weight", {8}},
           {"ln_1.bias", {8}},
           {"attn.c_attn.weight", {8, 24}},
           {"attn.c_attn.bias", {24}},
           {"attn.c_proj.weight", {8, 8}},
           {"attn.c_proj.bias", {8}},
           {"ln_2.weight", {8}},
           {"ln_2.bias", {8}},
           {"mlp.c_fc.weight", {8, 32}},
           {"mlp.c_fc.bias", {32}},
           {"mlp.c_proj.weight", {32, 8}},
           {"mlp.c_proj.bias", {8}},
         })
      expected["transformer.h." + i + "." + name] = sizes;
  std::map<std::string, std::vector<int64_t>> found;
  for (auto& item : model->named_parameters())
    found[item.key()] = item.value().sizes().vec();
  CHECK(found == expected);
}

TEST_CASE("A tied GPT has one object for both ends", "[runtime][gpt]") {
  auto cfg = tiny;
  cfg.tied = true;
  smp::gpt model{cfg};
  auto names = model->named_parameters();
  CHECK(names["lm_head.weight"].is_same(names["transformer.wte.weight"]));
  model(torch::zeros({1, 2}, torch::kLong)).sum().backward();
  CHECK(names["lm_head.weight"].grad().defined());
}

TEST_CASE("The GPT starts as GPT-2 does", "[runtime][gpt]") {
  torch::manual_seed(3);
  smp::gpt model{smp::model_sizes{.layers = 8}};
  for (auto& item : model->named_parameters()) {
    INFO(item.key());
    auto& p = item.value();
    auto ends = [&](const char* x) { return item.key().ends_with(x); };
    if (ends("bias"))
      CHECK(p.abs().max().item<double>() == 0);
    else if (p.dim() == 1)
      CHECK(torch::equal(p, torch::ones_like(p)));
    else
      // 0.02, or 0.02 / sqrt(2 * 8) where a residual branch ends.
      CHECK(
        p.std().item<double>()
        == Catch::Approx(ends("c_proj.weight") ? 0.005 : 0.02).epsilon(0.03));
  }
}

TEST_CASE("Dropout acts in training only", "[runtime][gpt]") {
  auto cfg = tiny;
  cfg.dropout = 0.5;
  smp::gpt model{cfg};
  randomise(model);
  auto tokens = torch::randint(13, {2, 6}, torch::kLong);
  CHECK_FALSE(torch::equal(model(tokens), model(tokens)));
  model->eval();
  CHECK(torch::equal(model(tokens), model(tokens)));
}

TEST_CASE("Sizes that make no GPT are refused by key", "[runtime][gpt]") {
  auto refuse = [](smp::model_sizes x, const char* text) {
    CHECK_THROWS_WITH(smp::gpt{x}, ContainsSubstring(text));
  };
  refuse({.layers = 0}, "model.layers is 0");
  refuse({.vocabulary = -1}, "model.vocabulary is -1");
  refuse({.heads = 3, .width = 256},
         "model.width (256) must be a multiple of model.heads (3)");
  refuse({.dropout = 1}, "model.dropout is 1");
}
