#include "tests/support/catch.hpp"

#include "tests/support/torch/peers.hpp"
#include "tp/distributions.hpp"
#include "tp/module_options.hpp"

#include <ATen/ops/dropout.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/softmax.h>
#include <torch/types.h>

#include <cmath>
#include <limits>

// The halves of a transformer layer as modules of their own, against their
// formulas.

using namespace smp;
using namespace smp::test;
using torch::Tensor;

namespace {

constexpr int64_t heads = 4;
constexpr int64_t channels = 24;
constexpr int64_t width = 32; // of all heads, not that of hidden states
constexpr int64_t inner = 40;
constexpr int64_t tokens = 5;
constexpr int64_t seen = 7; // of what is attended to
constexpr int64_t samples = 8;
constexpr double eps = 1e-3;

using leaves = std::map<std::string, Tensor>;

void add_linear(native_module& x, const std::string& name, int64_t in,
                int64_t out, bool inputs_first, torch::Dtype type) {
  auto w = torch::randn({out, in}) / std::sqrt(static_cast<double>(in));
  x.parameters[name + ".weight"] = (inputs_first ? w.t().contiguous() : w)
                                     .to(type);
  x.parameters[name + ".bias"] = torch::randn({out}).to(type);
}

template <class Kind>
void add_norms(native_module& x, const Kind& k, bool rms, torch::Dtype type) {
  auto add = [&](const std::string& name) {
    x.parameters[name + ".weight"] = torch::randn({channels}).to(type);
    if (!rms)
      x.parameters[name + ".bias"] = torch::randn({channels}).to(type);
  };
  if (k.pre_layernorm || k.post_layernorm)
    add("norm");
  if (k.pre_layernorm && k.post_layernorm)
    add("post");
}

/// What both formulas have in common.
class plain_half {
public:
  plain_half(const leaves& p, bool inputs_first, uint64_t peers)
    : p_(p), inputs_first_(inputs_first), peers_(peers) {
    // nop
  }

  Tensor linear(const Tensor& x, const std::string& name) const {
    auto& w = p_.at(name + ".weight");
    return at::linear(x, inputs_first_ ? w.t() : w, p_.at(name + ".bias"));
  }

  Tensor norm(const Tensor& x, const std::string& name = "norm") const {
    auto& w = p_.at(name + ".weight");
    if (auto bias = p_.find(name + ".bias"); bias != p_.end())
      return at::layer_norm(x, {channels}, w, bias->second, eps);
    return w * x * at::rsqrt(x.square().mean(-1, true) + eps);
  }

  /// Each peer's samples draw for themselves.
  Tensor dropout(const Tensor& x, double p, const std::string& seed) const {
    if (p == 0)
      return x;
    std::vector<Tensor> parts;
    for (auto& y : x.chunk(static_cast<int64_t>(peers_), 0)) {
      torch::manual_seed(thread_group::seed_of(parts.size(), seed));
      parts.push_back(at::dropout(y.contiguous(), p, true));
    }
    return torch::cat(parts, 0);
  }

  template <class Kind, class F>
  Tensor added(const Kind& k, const Tensor& x, F f) const {
    if (k.pre_layernorm && k.post_layernorm)
      return norm(x + f(norm(x)), "post");
    if (k.pre_layernorm)
      return x + f(norm(x));
    return k.post_layernorm ? norm(x + f(x)) : x + f(x);
  }

private:
  const leaves& p_;
  bool inputs_first_;
  uint64_t peers_;
};

// -- attention ----------------------------------------------------------------

struct attention_kind {
  bool pre_layernorm = true;
  bool post_layernorm = false;
  bool fused = false; // query, key and value in one linear, [in, out]
  bool causal = false;
  bool takes_mask = false;
  bool cross = false;
  double dropout = 0;
};

native_module attention_of(const attention_kind& k, torch::Dtype type,
                           bool saves_memory) {
  attention_layer_options o;
  o.num_attention_heads = heads;
  o.pre_layernorm = k.pre_layernorm;
  o.post_layernorm = k.post_layernorm;
  o.causal = k.causal;
  o.scale = 0.3;
  o.context = k.cross ? 1 : 0;
  o.mask = k.cross ? 2 : k.takes_mask ? 1 : 0;
  o.norm = {"norm", eps};
  o.post_norm = {"post", eps};
  if (k.fused)
    o.query_key_value = {{"qkv", true}};
  else
    o.query_key_value = {{"query"}, {"key"}, {"value"}};
  o.output = {"out", k.fused};
  o.dropout = {"", k.dropout};
  o.output_dropout = {"drop", k.dropout};
  auto x = described(o);
  x.name = "a.0";
  x.saves_memory = saves_memory;
  if (k.fused)
    add_linear(x, "qkv", channels, 3 * width, true, type);
  else
    for (auto* name : {"query", "key", "value"})
      add_linear(x, name, channels, width, false, type);
  add_linear(x, "out", width, channels, k.fused, type);
  add_norms(x, k, false, type);
  return x;
}

/// @param other a mask, what is attended to, or undefined
Tensor plain_attention(const attention_kind& k, const plain_half& how,
                       const Tensor& x, const Tensor& other) {
  return how.added(k, x, [&](const Tensor& h) {
    auto& from = k.cross ? other : h;
    auto qkv = k.fused
                 ? how.linear(h, "qkv").chunk(3, 2)
                 : std::vector{how.linear(h, "query"), how.linear(from, "key"),
                               how.linear(from, "value")};
    for (auto& y : qkv)
      y = y.view({y.size(0), y.size(1), heads, -1}).transpose(1, 2);
    auto scores = qkv[0].matmul(qkv[1].transpose(2, 3)) * 0.3;
    if (k.causal)
      scores = scores.masked_fill(
        torch::ones({tokens, tokens}, torch::kBool).triu(1),
        -std::numeric_limits<double>::infinity());
    if (k.takes_mask)
      scores = scores + other;
    auto weights = how.dropout(torch::softmax(scores, -1), k.dropout, "itself");
    auto y = weights.matmul(qkv[2]).transpose(1, 2).flatten(2);
    return how.dropout(how.linear(y, "out"), k.dropout, "a.0.drop");
  });
}

void check_attention(const attention_kind& k, uint64_t peers, torch::Dtype type,
                     bool saves_memory, double digits) {
  auto same = GENERATE(false, true);
  CAPTURE(peers, saves_memory, same, k.pre_layernorm, k.post_layernorm, k.fused,
          k.causal, k.takes_mask, k.cross, k.dropout);
  torch::manual_seed(21);
  auto x = attention_of(k, type, saves_memory);
  auto input = torch::randn({samples, tokens, channels}).to(type);
  auto seed = torch::randn({samples, tokens, channels}).to(type);
  Tensor other;
  if (k.cross)
    other = torch::randn({samples, seen, channels}).to(type);
  else if (k.takes_mask)
    other = torch::randn({samples, 1, tokens, tokens}).to(type);
  auto plain = [&](const Tensor& y, auto& p) {
    plain_half how{p, k.fused, same ? 1 : peers};
    return plain_attention(k, how, y, other);
  };
  auto expected = alone(x, input, seed, plain);
  check_equal(together(x, input, seed, peers, other, same), expected, digits);
}

// -- feed-forward -------------------------------------------------------------

struct output_kind {
  bool pre_layernorm = true;
  bool post_layernorm = false;
  bool gated = false;
  bool rms = false;
  bool inputs_first = false;
  double dropout = 0;
};

native_module output_of(const output_kind& k, torch::Dtype type,
                        bool saves_memory) {
  transformer_output_layer_options o;
  o.pre_layernorm = k.pre_layernorm;
  o.post_layernorm = k.post_layernorm;
  o.rms_norm = k.rms;
  o.activation = [](const Tensor& y) { return at::silu(y); };
  o.norm = {"norm", eps};
  o.post_norm = {"post", eps};
  o.intermediate = {"up", k.inputs_first};
  if (k.gated)
    o.gate = {"gate", k.inputs_first};
  o.output = {"down", k.inputs_first};
  o.inner_dropout = {"inner", k.dropout};
  o.output_dropout = {"drop", k.dropout};
  auto x = described(o);
  x.name = "f.0";
  x.saves_memory = saves_memory;
  add_linear(x, "up", channels, inner, k.inputs_first, type);
  if (k.gated)
    add_linear(x, "gate", channels, inner, k.inputs_first, type);
  add_linear(x, "down", inner, channels, k.inputs_first, type);
  add_norms(x, k, k.rms, type);
  return x;
}

Tensor plain_output(const output_kind& k, const plain_half& how,
                    const Tensor& x) {
  return how.added(k, x, [&](const Tensor& h) {
    auto y = at::silu(how.linear(h, "up"));
    if (k.gated)
      y = y * how.linear(h, "gate");
    y = how.dropout(y, k.dropout, "f.0.inner");
    return how.dropout(how.linear(y, "down"), k.dropout, "f.0.drop");
  });
}

void check_output(const output_kind& k, uint64_t peers, torch::Dtype type,
                  bool saves_memory, double digits) {
  auto same = GENERATE(false, true);
  CAPTURE(peers, saves_memory, same, k.pre_layernorm, k.post_layernorm, k.gated,
          k.rms, k.inputs_first, k.dropout);
  torch::manual_seed(22);
  auto x = output_of(k, type, saves_memory);
  auto input = torch::randn({samples, tokens, channels}).to(type);
  auto seed = torch::randn({samples, tokens, channels}).to(type);
  auto plain = [&](const Tensor& y, auto& p) {
    return plain_output(k, {p, k.inputs_first, same ? 1 : peers}, y);
  };
  auto expected = alone(x, input, seed, plain);
  check_equal(together(x, input, seed, peers, {}, same), expected, digits);
}

} // namespace

TEST_CASE("attention computes the same shared as alone",
          "[tp][transformer_layer][R54]") {
  uint64_t peers = GENERATE(1, 2, 4);
  auto saves_memory = GENERATE(false, true);
  auto k = GENERATE(
    attention_kind{}, attention_kind{.fused = true, .causal = true},
    attention_kind{
      .pre_layernorm = false, .post_layernorm = true, .takes_mask = true},
    attention_kind{.causal = true, .dropout = 0.3},
    attention_kind{
      .pre_layernorm = false, .post_layernorm = true, .cross = true},
    attention_kind{.post_layernorm = true, .cross = true},
    attention_kind{.pre_layernorm = false, .cross = true},
    attention_kind{.cross = true, .dropout = 0.3});
  check_attention(k, peers, torch::kDouble, saves_memory, 1e-11);
}

TEST_CASE("the feed-forward half computes the same shared as alone",
          "[tp][transformer_layer][R54]") {
  uint64_t peers = GENERATE(1, 2, 4);
  auto saves_memory = GENERATE(false, true);
  auto k = GENERATE(output_kind{},
                    output_kind{.pre_layernorm = false,
                                .post_layernorm = true,
                                .inputs_first = true},
                    output_kind{.post_layernorm = true, .rms = true},
                    output_kind{.pre_layernorm = false},
                    output_kind{.gated = true, .rms = true},
                    output_kind{.gated = true, .dropout = 0.3});
  check_output(k, peers, torch::kDouble, saves_memory, 1e-11);
}

TEST_CASE("shared halves of a layer have the digits of their types",
          "[tp][transformer_layer]") {
  uint64_t peers = GENERATE(2, 4);
  auto saves_memory = GENERATE(false, true);
  // The bias of a key alone has no gradient but what is rounded.
  attention_kind k{.fused = true};
  check_attention(k, peers, torch::kFloat, saves_memory, 2e-5);
  check_attention(k, peers, torch::kBFloat16, saves_memory, 8e-2);
  check_output({}, peers, torch::kFloat, saves_memory, 2e-5);
  check_output({}, peers, torch::kBFloat16, saves_memory, 8e-2);
  check_output({.gated = true, .rms = true}, peers, torch::kFloat, saves_memory,
               3e-5);
}

// What a causal module asks of another part of the model has no order.
TEST_CASE("attention to its own hidden states as a context is not causal",
          "[tp][transformer_layer]") {
  auto saves_memory = GENERATE(false, true);
  torch::manual_seed(23);
  attention_kind k{.pre_layernorm = false,
                   .post_layernorm = true,
                   .causal = true,
                   .cross = true};
  auto x = attention_of(k, torch::kDouble, saves_memory);
  auto input = torch::randn({2, tokens, channels}, torch::kDouble);
  std::vector<Tensor> outputs(2);
  std::vector<shared_module> modules;
  for (uint64_t i = 0; i < 2; ++i)
    modules.push_back(share(x, i, 2));
  thread_group group{2};
  group.on_all([&](uint64_t i) {
    auto mine = input.narrow(0, static_cast<int64_t>(i), 1);
    outputs[i] = modules[i].module->forward(std::vector{mine, mine}).at(0);
  });
  k.causal = false;
  auto expected = plain_attention(k, {x.parameters, false, 1}, input, input);
  CHECK(torch::allclose(torch::cat(outputs).detach(), expected, 1e-11, 1e-11));
}

TEST_CASE("a half of a layer that cannot be shared says why",
          "[tp][transformer_layer]") {
  auto refusal = [](const native_module& x, int64_t peers) {
    return find_distribution(x.type)->refusal(x, peers);
  };
  auto attends = attention_of({}, torch::kFloat, false);
  CHECK(attends.type == "AttentionLayer");
  CHECK(refusal(attends, 3)
        == "its 4 heads cannot be divided among 3 ranks; 3 or 6 could (its "
           "linears may be)");
  attends.parameters["up.weight"] = torch::ones({inner, channels});
  CHECK(refusal(attends, 2)
        == "what it computes was told without its parameter 'up.weight'; its "
           "options have to name the module of that");
  auto widens = output_of({}, torch::kFloat, false);
  CHECK(widens.type == "TransformerOutputLayer");
  CHECK(refusal(widens, 3)
        == "its 40 inner channels cannot be divided among 3 ranks; 39 or 42 "
           "could (its linears may be)");
  CHECK(refusal(described(attention_layer_options{}), 2)
        == "its options name no linears; they have to say where its parts "
           "are");
  attention_layer_options two;
  two.query_key_value = {{"query"}, {"key"}};
  two.output = {"out"};
  auto mistaken = described(two);
  mistaken.parameters = attention_of({}, torch::kFloat, false).parameters;
  CHECK(refusal(mistaken, 1)
        == "its attention begins with 2 linears; its options have to name one, "
           "or three (query_key_value)");
  two.context = 1;
  CHECK(described(two).doubt
        == "it attends to something else; its options have to name three "
           "linears (query_key_value)");
}
