// ctest: seconds=11
#include "tests/support/catch.hpp"

#include "runtime/base/autocast.hpp"
#include "tests/support/torch/live_bytes.hpp"
#include "tests/support/torch/near.hpp"
#include "tests/support/torch/peers.hpp"
#include "tp/distributions.hpp"
#include "tp/transformer/transformer_layer_options.hpp"

#include <ATen/ops/dropout.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/softmax.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/types.h>

#include <algorithm>
#include <cmath>
#include <limits>

using namespace smp;
using namespace smp::test;
using torch::Tensor;

namespace {

constexpr int64_t heads = 4;
constexpr int64_t width = 64;
constexpr int64_t inner = 96;
constexpr int64_t tokens = 6;
constexpr int64_t samples = 8;

const std::map<std::string, double> epsilons{
  {"ln_1", 1e-5}, {"ln_2", 1e-6}, {"post_1", 1e-4}, {"post_2", 1e-3}};

struct kind {
  bool pre_layernorm = true;
  bool post_layernorm = false;
  bool fused = true; // query, key and value in one linear, [in, out]
  bool causal = true;
  bool takes_mask = false;
  int64_t window = 0;
  double dropout = 0;
};

native_module layer_of(const kind& k, torch::Dtype type, bool saves_memory) {
  transformer_layer_options o;
  o.num_attention_heads = heads;
  o.pre_layernorm = k.pre_layernorm;
  o.post_layernorm = k.post_layernorm;
  o.causal = k.causal;
  o.window = k.window;
  o.takes_mask = o.returns_arguments = k.takes_mask;
  o.activation = [](const Tensor& x) { return at::gelu(x); };
  o.attention_norm = {"ln_1", epsilons.at("ln_1")};
  o.output_norm = {"ln_2", epsilons.at("ln_2")};
  o.attention_post_norm = {"post_1", epsilons.at("post_1")};
  o.output_post_norm = {"post_2", epsilons.at("post_2")};
  if (k.fused)
    o.query_key_value = {{"attn.qkv", true}};
  else
    o.query_key_value = {{"attn.q"}, {"attn.k"}, {"attn.v"}};
  o.attention_output = {"attn.proj", k.fused};
  o.intermediate = {"mlp.up", k.fused};
  o.output = {"mlp.down", k.fused};
  o.attention_dropout = {"attn", k.dropout};
  o.attention_output_dropout = {"attn.drop", k.dropout};
  o.output_dropout = {"mlp.drop", k.dropout};
  native_module x{"TransformerLayer"};
  x.name = "h.0";
  x.saves_memory = saves_memory;
  auto linear = [&](const std::string& name, int64_t in, int64_t out) {
    auto w = torch::randn({out, in}) / std::sqrt(static_cast<double>(in));
    x.parameters[name + ".weight"] = (k.fused ? w.t().contiguous() : w)
                                       .to(type);
    x.parameters[name + ".bias"] = torch::randn({out}).to(type);
  };
  if (k.fused)
    linear("attn.qkv", width, 3 * width);
  else
    for (auto* name : {"attn.q", "attn.k", "attn.v"})
      linear(name, width, width);
  linear("attn.proj", width, width);
  linear("mlp.up", width, inner);
  linear("mlp.down", inner, width);
  auto norm = [&](const std::string& name) {
    x.parameters[name + ".weight"] = torch::randn({width}).to(type);
    x.parameters[name + ".bias"] = torch::randn({width}).to(type);
  };
  for (std::string half : {"1", "2"}) {
    if (k.pre_layernorm || k.post_layernorm)
      norm("ln_" + half);
    if (k.pre_layernorm && k.post_layernorm)
      norm("post_" + half);
  }
  x.layer = std::make_shared<transformer_layer_options>(std::move(o));
  return x;
}

/// The formula of a layer, as its paper has it.
class plain_layer {
public:
  plain_layer(const kind& k, const std::map<std::string, Tensor>& p,
              uint64_t peers)
    : k_(k), p_(p), peers_(peers) {
    // nop
  }

  Tensor run(const Tensor& x, const Tensor& mask) const {
    auto y = half(x, "1", [&](const Tensor& h) { return attend(h, mask); });
    return half(y, "2", [&](const Tensor& h) { return feed_forward(h); });
  }

private:
  template <class F>
  Tensor half(const Tensor& x, const std::string& which, F f) const {
    if (k_.pre_layernorm && k_.post_layernorm)
      return norm(x + f(norm(x, "ln_" + which)), "post_" + which);
    if (k_.pre_layernorm)
      return x + f(norm(x, "ln_" + which));
    if (k_.post_layernorm)
      return norm(x + f(x), "ln_" + which);
    return x + f(x);
  }

  Tensor linear(const Tensor& x, const std::string& name) const {
    auto& w = p_.at(name + ".weight");
    return at::linear(x, k_.fused ? w.t() : w, p_.at(name + ".bias"));
  }

  Tensor norm(const Tensor& x, const std::string& name) const {
    return at::layer_norm(x, {width}, p_.at(name + ".weight"),
                          p_.at(name + ".bias"), epsilons.at(name));
  }

  /// Each peer's samples draw for themselves.
  Tensor dropout(const Tensor& x, const std::string& name) const {
    if (k_.dropout == 0)
      return x;
    std::vector<Tensor> parts;
    for (auto& y : x.chunk(static_cast<int64_t>(peers_), 0)) {
      torch::manual_seed(thread_group::seed_of(parts.size(), "h.0." + name));
      parts.push_back(at::dropout(y.contiguous(), k_.dropout, true));
    }
    return torch::cat(parts, 0);
  }

  Tensor attend(const Tensor& x, const Tensor& mask) const {
    std::vector<Tensor> qkv;
    if (k_.fused)
      qkv = linear(x, "attn.qkv").chunk(3, 2);
    else
      qkv = {linear(x, "attn.q"), linear(x, "attn.k"), linear(x, "attn.v")};
    for (auto& y : qkv)
      y = y.view({x.size(0), tokens, heads, -1}).transpose(1, 2);
    auto scores = qkv[0].matmul(qkv[1].transpose(2, 3))
                  / std::sqrt(static_cast<double>(width / heads));
    if (k_.causal) {
      auto seen = torch::ones({tokens, tokens}, torch::kBool).tril();
      if (k_.window > 0)
        seen = seen.triu(1 - k_.window);
      scores = scores.masked_fill(seen.logical_not(),
                                  -std::numeric_limits<double>::infinity());
    }
    if (mask.defined())
      scores = scores + mask;
    auto y = dropout(torch::softmax(scores, -1), "attn").matmul(qkv[2]);
    return dropout(linear(y.transpose(1, 2).flatten(2), "attn.proj"),
                   "attn.drop");
  }

  Tensor feed_forward(const Tensor& x) const {
    return dropout(linear(at::gelu(linear(x, "mlp.up")), "mlp.down"),
                   "mlp.drop");
  }

  const kind& k_;
  const std::map<std::string, Tensor>& p_;
  uint64_t peers_;
};

/// [n, 1, tokens, tokens]
Tensor mask_of(torch::Dtype type, int64_t n) {
  return torch::randn({n, 1, tokens, tokens}).to(type);
}

/// @param n samples of all peers
void check(const kind& k, uint64_t peers, torch::Dtype type, bool saves_memory,
           double digits, int64_t n = samples) {
  auto same = GENERATE(false, true);
  CAPTURE(same);
  CAPTURE(peers, k.pre_layernorm, k.post_layernorm, k.fused, k.causal, k.window,
          k.takes_mask, k.dropout, saves_memory);
  torch::manual_seed(11);
  auto x = layer_of(k, type, saves_memory);
  auto input = torch::randn({n, tokens, width}).to(type);
  auto seed = torch::randn({n, tokens, width}).to(type);
  auto mask = k.takes_mask ? mask_of(type, n) : Tensor{};
  auto plain = [&](const Tensor& y, auto& leaves) {
    return plain_layer{k, leaves, same ? 1 : peers}.run(y, mask);
  };
  auto expected = alone(x, input, seed, plain);
  check_equal(together(x, input, seed, peers, mask, same), expected, digits);
}

} // namespace

TEST_CASE("a transformer layer computes the same shared as alone",
          "[tp][transformer_layer]") {
  uint64_t peers = GENERATE(1, 2, 4);
  auto saves_memory = GENERATE(false, true);
  auto k = GENERATE(
    kind{}, kind{.causal = false}, kind{.window = 3}, kind{.fused = false},
    kind{.pre_layernorm = false,
         .post_layernorm = true,
         .fused = false,
         .causal = false,
         .takes_mask = true},
    kind{.post_layernorm = true}, kind{.pre_layernorm = false, .fused = false});
  check(k, peers, torch::kDouble, saves_memory, 1e-11);
}

// Of so many samples that inputs and results of linears travel in segments.
TEST_CASE("a large transformer layer computes the same shared as alone",
          "[tp][transformer_layer]") {
  uint64_t peers = GENERATE(2, 4);
  auto k = GENERATE(kind{}, kind{.fused = false});
  check(k, peers, torch::kDouble, false, 1e-11, 2800);
}

TEST_CASE("a shared transformer layer drops what it would alone",
          "[tp][transformer_layer][R54]") {
  uint64_t peers = GENERATE(1, 2, 4);
  auto saves_memory = GENERATE(false, true);
  auto k = GENERATE(kind{.dropout = 0.3}, kind{.window = 3, .dropout = 0.3},
                    kind{.pre_layernorm = false,
                         .post_layernorm = true,
                         .fused = false,
                         .causal = false,
                         .takes_mask = true,
                         .dropout = 0.3});
  check(k, peers, torch::kDouble, saves_memory, 1e-11);
}

TEST_CASE("shared transformer layers have the digits of their types",
          "[tp][transformer_layer]") {
  uint64_t peers = GENERATE(2, 4);
  auto saves_memory = GENERATE(false, true);
  check({}, peers, torch::kFloat, saves_memory, 2e-5);
  check({.post_layernorm = true}, peers, torch::kFloat, saves_memory, 2e-5);
  check({.pre_layernorm = false}, peers, torch::kFloat, saves_memory, 2e-5);
  check({}, peers, torch::kBFloat16, saves_memory, peers == 2 ? 6e-2 : 8e-2);
}

TEST_CASE("shared layers of other kinds have the digits of their types",
          "[tp][transformer_layer]") {
  auto saves_memory = GENERATE(false, true);
  auto k = GENERATE(
    kind{.window = 3, .dropout = 0.3},
    kind{.pre_layernorm = false, .causal = false, .takes_mask = true});
  check(k, 2, torch::kFloat, saves_memory, 3e-5);
  check(k, 2, torch::kBFloat16, saves_memory, 1e-1);
}

TEST_CASE("a shared layer has the type that autocast gives it alone",
          "[tp][transformer_layer]") {
  auto saves_memory = GENERATE(false, true);
  auto type = GENERATE(torch::kFloat, torch::kBFloat16);
  auto same = GENERATE(false, true);
  CAPTURE(saves_memory, type, same);
  constexpr uint64_t peers = 2;
  torch::manual_seed(17);
  const kind k{};
  auto x = layer_of(k, torch::kFloat, saves_memory);
  auto input = torch::randn({samples, tokens, width}).to(type);
  auto expected = [&] {
    autocast casts{torch::kBFloat16};
    return plain_layer{k, x.parameters, 1}.run(input, {});
  }();
  REQUIRE(expected.scalar_type() == type);
  std::vector<shared_module> modules;
  for (uint64_t i = 0; i < peers; ++i)
    modules.push_back(share(x, i, peers));
  std::vector<Tensor> outputs(peers);
  thread_group group{peers, same};
  group.on_all([&](uint64_t i) {
    autocast casts{torch::kBFloat16};
    std::vector mine{same ? input : input.chunk(peers)[i]};
    outputs[i] = modules[i].module->forward(mine).at(0).detach();
  });
  auto found = same ? same_of_all(outputs) : torch::cat(outputs);
  CHECK(found.scalar_type() == type);
  check_near(found, expected, 1e-1);
}

TEST_CASE("a mask for all samples is one for those of others",
          "[tp][transformer_layer]") {
  auto saves_memory = GENERATE(false, true);
  kind k{.causal = false, .takes_mask = true};
  torch::manual_seed(12);
  auto x = layer_of(k, torch::kDouble, saves_memory);
  auto input = torch::randn({samples, tokens, width}, torch::kDouble);
  auto seed = torch::randn({samples, tokens, width}, torch::kDouble);
  auto by_head = torch::randn({1, heads, tokens, tokens}, torch::kDouble);
  auto plain = [&](const Tensor& y, auto& leaves) {
    return plain_layer{k, leaves, 2}.run(y, by_head);
  };
  check_equal(together(x, input, seed, 2, by_head),
              alone(x, input, seed, plain), 1e-11);
}

namespace {

/// @returns bytes that a peer keeps for backward
int64_t kept_bytes(uint64_t peers, bool saves_memory) {
  torch::manual_seed(14);
  auto x = layer_of({}, torch::kFloat, saves_memory);
  auto input = torch::randn({samples, tokens, width});
  auto parts = input.chunk(static_cast<int64_t>(peers), 0);
  std::vector<int64_t> result(peers);
  thread_group group{peers};
  std::vector<shared_module> modules;
  for (uint64_t i = 0; i < peers; ++i)
    modules.push_back(share(x, i, peers));
  group.on_all([&](uint64_t i) {
    auto bytes = std::make_shared<live_bytes>();
    c10::DebugInfoGuard guard{c10::DebugInfoKind::PROFILER_STATE, bytes};
    // A result of another layer: kept for this one alone.
    auto mine = parts[i].clone().requires_grad_() + 0;
    auto y = modules[i].module->forward(std::vector{mine}).at(0);
    // What the group lays on its table stays there.
    auto before = bytes->now;
    mine.reset();
    y.reset();
    result[i] = before - bytes->now;
  });
  for (auto n : result)
    CHECK(n <= result[0] + result[0] / 10);
  return *std::ranges::max_element(result);
}

} // namespace

// Of T peers with B samples together, each keeps 1 / T of what one process does
// of these: as with Megatron's sequence parallelism (Korthikanti et al. 2022,
// equation 4, without dropout and scores), of each token 8 C + 2 I numbers.
TEST_CASE("a layer for memory keeps no activation twice",
          "[tp][transformer_layer][memory]") {
  auto formula = samples * tokens * (8 * width + 2 * inner)
                 * static_cast<int64_t>(sizeof(float));
  auto alone = kept_bytes(1, false);
  INFO(alone << " bytes alone, by the formula " << formula);
  CHECK(alone >= formula);
  CHECK(alone <= formula + formula / 5);
  for (int64_t peers : {2, 4}) {
    auto shared = kept_bytes(static_cast<uint64_t>(peers), true);
    INFO(shared << " bytes by each of " << peers);
    CHECK(shared <= alone / peers + alone / peers / 10);
    CHECK(shared >= formula / peers);
  }
}

namespace {

/// @returns the most bytes that a peer holds in forward, of one sample each
int64_t peak_with_dropout(uint64_t peers, bool saves_memory) {
  torch::manual_seed(15);
  // So many tokens that scores are larger than all else.
  auto x = layer_of({.causal = false, .dropout = 0.3}, torch::kFloat,
                    saves_memory);
  std::vector<int64_t> result(peers);
  thread_group group{peers};
  std::vector<shared_module> modules;
  for (uint64_t i = 0; i < peers; ++i)
    modules.push_back(share(x, i, peers));
  group.on_all([&](uint64_t i) {
    auto bytes = std::make_shared<live_bytes>();
    c10::DebugInfoGuard guard{c10::DebugInfoKind::PROFILER_STATE, bytes};
    modules[i].module->forward(std::vector{torch::ones({1, 512, width})});
    result[i] = bytes->peak;
  });
  return *std::ranges::max_element(result);
}

} // namespace

TEST_CASE("a rank has no dropout mask but those of its heads and one peer's",
          "[tp][transformer_layer][memory][R54]") {
  auto saves_memory = GENERATE(false, true);
  auto scores = heads * 512 * 512 * static_cast<int64_t>(sizeof(float));
  auto alone = peak_with_dropout(1, saves_memory);
  auto shared = peak_with_dropout(4, saves_memory);
  CAPTURE(saves_memory, scores, alone, shared);
  CHECK(alone >= 4 * scores);
  CHECK(shared <= alone + scores); // activations of all samples are fewer
}

TEST_CASE("a layer for memory has a part of each parameter",
          "[tp][transformer_layer]") {
  torch::manual_seed(13);
  auto x = layer_of({}, torch::kFloat, true);
  auto mine = share(x, 0, 4);
  // Weights over inputs, norms over channels, biases on the first.
  CHECK((mine.mine.parameters.at("attn.qkv.weight").sizes()
         == at::IntArrayRef{width / 4, 3 * width}));
  CHECK(mine.mine.parameters.at("ln_1.weight").numel() == width / 4);
  CHECK(mine.mine.parameters.at("mlp.up.bias").numel() == inner);
  CHECK(share(x, 1, 4).mine.parameters.at("mlp.up.bias").numel() == 0);
}

TEST_CASE("a layer for speed has whole heads on each peer",
          "[tp][transformer_layer]") {
  torch::manual_seed(13);
  auto x = layer_of({}, torch::kFloat, false);
  auto mine = share(x, 1, 2);
  auto& whole = x.parameters.at("attn.qkv.weight");
  auto& part = mine.mine.parameters.at("attn.qkv.weight");
  for (int64_t i = 0; i < 3; ++i)
    CHECK(torch::equal(part.narrow(1, i * width / 2, width / 2).detach(),
                       whole.narrow(1, i * width + width / 2, width / 2)));
  CHECK(mine.mine.parameters.at("ln_1.weight").numel() == width);
  CHECK(mine.mine.parameters.at("mlp.down.bias").numel() == width);
}

TEST_CASE("a layer that cannot be divided says why",
          "[tp][transformer_layer]") {
  auto refusal = [](const native_module& x, int64_t peers) {
    return find_distribution("TransformerLayer")->refusal(x, peers);
  };
  auto x = layer_of({}, torch::kFloat, false);
  CHECK(refusal(x, 4).empty());
  CHECK(refusal(x, 3)
        == "its 4 heads cannot be divided among 3 ranks; 3 or 6 could (its "
           "linears may be)");
  x.parameters.erase("mlp.up.weight");
  CHECK(refusal(x, 2)
        == "it has no parameter 'mlp.up.weight'; its options have to name one "
           "that it has");
}

TEST_CASE("norms that a layer has no place for are parameters not told of",
          "[tp][transformer_layer]") {
  auto refusal = [](const native_module& x) {
    return find_distribution(x.type)->refusal(x, 2);
  };
  auto both = layer_of({.post_layernorm = true}, torch::kFloat, true);
  CHECK(refusal(both) == "");
  auto x = layer_of({}, torch::kFloat, true);
  x.parameters = both.parameters;
  CHECK(refusal(x)
        == "what it computes was told without its parameter 'post_1.bias'; its "
           "options have to name the module of that");
}

TEST_CASE("a shared layer takes no more tokens than its causal mask is for",
          "[tp][transformer_layer]") {
  auto saves_memory = GENERATE(false, true);
  auto x = layer_of({}, torch::kFloat, saves_memory);
  auto o = *x.layer;
  o.causal_mask_size = tokens - 1;
  x.layer = std::make_shared<transformer_layer_options>(o);
  auto run = [&](int64_t n) {
    auto mine = share(x, 0, 1);
    std::string result;
    thread_group group{1};
    try {
      group.on_all([&](uint64_t) {
        mine.module->forward(std::vector{torch::ones({1, n, width})});
      });
    } catch (const std::exception& e) {
      result = e.what();
    }
    return result;
  };
  CHECK(run(tokens - 1) == "");
  CHECK_THAT(run(tokens),
             Catch::Matchers::ContainsSubstring(
               "a sequence of 6 tokens, but causal_mask_size is 5"));
}
