#include "tests/support/catch.hpp"

#include "tests/support/torch/counting_group.hpp"
#include "tests/support/torch/live_bytes.hpp"
#include "tests/support/torch/near.hpp"
#include "tests/support/torch/peers.hpp"
#include "tp/entered_tensors.hpp"
#include "tp/transformer/transformer_layer_options.hpp"

#include <ATen/ops/dropout.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/softmax.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/types.h>

#include <cmath>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

// Layers of T5: biases of positions that are learned and handed on, norms
// without mean, a gate, and attention over what an encoder made.

using namespace smp;
using namespace smp::test;
using torch::Tensor;

namespace {

constexpr int64_t heads = 4;
constexpr int64_t width = 12;
constexpr int64_t attended = 20; // of all heads: 5 each
constexpr int64_t inner = 16;
constexpr int64_t tokens = 5;
constexpr int64_t seen = 7; // tokens of the encoder
constexpr int64_t samples = 8;
constexpr int64_t distances = 9;

struct kind {
  bool decoder = true;
  bool gated = false;
  bool positions = true;
  bool pre_layernorm = true;
  bool post_layernorm = false;
  double dropout = 0;
};

/// table: [distances, h] @returns [1, h, tokens, tokens]
Tensor bias_of(const Tensor& table, int64_t n) {
  auto at = torch::arange(n, torch::kLong);
  auto distance = at.unsqueeze(0) - at.unsqueeze(1) + distances / 2;
  return table.index({distance.clamp(0, distances - 1)})
    .permute({2, 0, 1})
    .unsqueeze(0);
}

void add_norms(native_module& x, const kind& k, const std::string& part,
               torch::Dtype type) {
  if (k.pre_layernorm || k.post_layernorm)
    x.parameters[part + ".norm.weight"] = torch::randn({width}).to(type);
  if (k.pre_layernorm && k.post_layernorm)
    x.parameters[part + ".post.norm.weight"] = torch::randn({width}).to(type);
}

native_module layer_of(const kind& k, torch::Dtype type, bool saves_memory) {
  native_module x{"TransformerLayer"};
  x.name = "block.0";
  x.saves_memory = saves_memory;
  auto linear = [&](const std::string& name, int64_t in, int64_t out) {
    x.parameters[name + ".weight"] = (torch::randn({out, in})
                                      / std::sqrt(static_cast<double>(in)))
                                       .to(type);
  };
  transformer_layer_options o;
  o.num_attention_heads = heads;
  o.pre_layernorm = k.pre_layernorm;
  o.post_layernorm = k.post_layernorm;
  o.scale = 1;
  o.takes_mask = o.returns_arguments = o.rms_norm = true;
  o.activation = [](const Tensor& y) { return at::gelu(y); };
  o.containers = {"layer"};
  for (std::string name : {"layer.self", "layer.cross"}) {
    if (name == "layer.cross" && !k.decoder)
      break;
    for (auto* part : {".q", ".k", ".v"})
      linear(name + part, width, attended);
    linear(name + ".o", attended, width);
    add_norms(x, k, name, type);
  }
  o.attention_norm = {"layer.self.norm", 1e-5};
  o.attention_post_norm = {"layer.self.post.norm", 1e-3};
  o.query_key_value = {{"layer.self.q"}, {"layer.self.k"}, {"layer.self.v"}};
  o.attention_output = {"layer.self.o"};
  o.attention_dropout = {"layer.self", k.dropout};
  o.attention_output_dropout = {"layer.self.drop", k.dropout};
  if (k.positions) {
    x.parameters["layer.self.table.weight"] = torch::randn({distances, heads})
                                                .to(type);
    o.positions = {"layer.self.table", bias_of};
  }
  if (k.decoder)
    o.cross_attention = {{"layer.cross.norm", 1e-6},
                         {"layer.cross.q"},
                         {"layer.cross.k"},
                         {"layer.cross.v"},
                         {"layer.cross.o"},
                         {"layer.cross", k.dropout},
                         {"layer.cross.drop", k.dropout},
                         {"layer.cross.post.norm", 1e-3}};
  linear("layer.ff.wi", width, inner);
  if (k.gated)
    linear("layer.ff.gate", width, inner);
  linear("layer.ff.wo", inner, width);
  add_norms(x, k, "layer.ff", type);
  o.output_norm = {"layer.ff.norm", 1e-4};
  o.output_post_norm = {"layer.ff.post.norm", 1e-3};
  o.intermediate = {"layer.ff.wi"};
  o.gate = {k.gated ? "layer.ff.gate" : ""};
  o.output = {"layer.ff.wo"};
  o.inner_dropout = {"layer.ff.inside", k.dropout};
  o.output_dropout = {"layer.ff.drop", k.dropout};
  x.layer = std::make_shared<transformer_layer_options>(std::move(o));
  return x;
}

/// The formula of a layer, as its paper has it (Raffel et al. 2020).
class plain_layer {
public:
  plain_layer(const kind& k, const std::map<std::string, Tensor>& p,
              uint64_t peers)
    : k_(k), p_(p), peers_(peers) {
    // nop
  }

  std::vector<Tensor> run(std::vector<Tensor> xs) const {
    auto x = xs[0];
    if (k_.positions)
      xs[1] = xs[1] + bias_of(p_.at("layer.self.table.weight"), tokens);
    auto half = [&](const std::string& name, double eps, auto f) {
      auto y = x + f(k_.pre_layernorm ? norm(x, name, eps) : x);
      if (k_.pre_layernorm && k_.post_layernorm)
        y = norm(y, name + ".post", 1e-3);
      else if (k_.post_layernorm)
        y = norm(y, name, eps);
      x = y;
    };
    half("layer.self", 1e-5,
         [&](const Tensor& h) { return attend(h, h, xs[1], "layer.self"); });
    if (k_.decoder)
      half("layer.cross", 1e-6, [&](const Tensor& h) {
        return attend(h, xs[2], xs[3], "layer.cross");
      });
    half("layer.ff", 1e-4, [&](const Tensor& h) {
      auto y = at::gelu(linear(h, "layer.ff.wi"));
      if (k_.gated)
        y = y * linear(h, "layer.ff.gate");
      return dropout(linear(dropout(y, "layer.ff.inside"), "layer.ff.wo"),
                     "layer.ff.drop");
    });
    xs[0] = x;
    return xs;
  }

private:
  Tensor linear(const Tensor& x, const std::string& name) const {
    return at::linear(x, p_.at(name + ".weight"));
  }

  Tensor norm(const Tensor& x, const std::string& name, double eps) const {
    return p_.at(name + ".norm.weight") * x
           / (x.square().mean(-1, true) + eps).sqrt();
  }

  /// Each peer's samples draw for themselves.
  Tensor dropout(const Tensor& x, const std::string& name) const {
    if (k_.dropout == 0)
      return x;
    std::vector<Tensor> parts;
    for (auto& y : x.chunk(static_cast<int64_t>(peers_), 0)) {
      torch::manual_seed(
        thread_group::seed_of(parts.size(), "block.0." + name));
      parts.push_back(at::dropout(y.contiguous(), k_.dropout, true));
    }
    return torch::cat(parts, 0);
  }

  Tensor attend(const Tensor& x, const Tensor& context, const Tensor& mask,
                const std::string& name) const {
    auto part = [&](const Tensor& y, const char* which) {
      return linear(y, name + which)
        .view({samples, y.size(1), heads, -1})
        .transpose(1, 2);
    };
    auto scores = part(x, ".q").matmul(part(context, ".k").transpose(2, 3));
    auto weights = dropout(torch::softmax(scores + mask, -1), name);
    auto y = weights.matmul(part(context, ".v"));
    return dropout(linear(y.transpose(1, 2).flatten(2), name + ".o"),
                   name + ".drop");
  }

  const kind& k_;
  const std::map<std::string, Tensor>& p_;
  uint64_t peers_;
};

using numbers = std::map<std::string, Tensor>;

struct arguments {
  std::vector<Tensor> inputs; // hidden states, mask, context, its mask
  std::vector<Tensor> seeds;  // for the first two results
};

arguments arguments_of(const kind& k, torch::Dtype type) {
  arguments result;
  auto mask = torch::randn({samples, heads, tokens, tokens});
  result.inputs = {torch::randn({samples, tokens, width}), mask};
  if (k.decoder)
    result.inputs.insert(result.inputs.end(),
                         {torch::randn({samples, seen, width}),
                          torch::randn({samples, 1, 1, seen})});
  result.seeds = {torch::randn_like(result.inputs[0]), torch::randn_like(mask)};
  for (auto* xs : {&result.inputs, &result.seeds})
    for (auto& x : *xs)
      x = x.to(type);
  return result;
}

/// Forward, and backward through hidden states and mask.
/// @returns results and gradients of all inputs
template <class F>
std::vector<Tensor> go(std::vector<Tensor> xs, const std::vector<Tensor>& seeds,
                       F f) {
  for (auto& x : xs)
    x = x.detach().clone().requires_grad_();
  std::vector<Tensor> result = f(xs);
  torch::autograd::backward({result[0], result[1]}, seeds);
  for (auto& x : result)
    x = x.detach();
  for (auto& x : xs)
    result.push_back(x.grad());
  return result;
}

void check(const kind& k, uint64_t peers, torch::Dtype type, bool saves_memory,
           double share) {
  auto same = GENERATE(false, true);
  CAPTURE(same, peers, k.decoder, k.gated, k.positions, k.pre_layernorm,
          k.post_layernorm, k.dropout, saves_memory);
  torch::manual_seed(21);
  auto x = layer_of(k, type, saves_memory);
  auto given = arguments_of(k, type);
  auto leaves = x.parameters;
  for (auto& [name, t] : leaves)
    t = t.detach().clone().requires_grad_();
  auto expected = go(given.inputs, given.seeds, [&](auto& xs) {
    return plain_layer{k, leaves, same ? 1 : peers}.run(xs);
  });
  std::vector<shared_module> modules;
  for (uint64_t i = 0; i < peers; ++i)
    modules.push_back(test::share(x, i, peers));
  std::vector<std::vector<Tensor>> found(peers);
  thread_group group{peers, same};
  group.on_all([&](uint64_t i) {
    auto own = [&](const std::vector<Tensor>& xs) {
      std::vector<Tensor> result;
      for (auto& y : xs)
        result.push_back(same ? y : y.chunk(static_cast<int64_t>(peers)).at(i));
      return result;
    };
    found[i] = go(own(given.inputs), own(given.seeds),
                  [&](auto& xs) { return modules[i].module->forward(xs); });
  });
  REQUIRE(found[0].size() == expected.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    INFO("tensor " << i);
    std::vector<Tensor> parts;
    for (auto& xs : found)
      parts.push_back(xs.at(i));
    check_near(same ? same_of_all(parts) : torch::cat(parts), expected[i],
               share);
  }
  for (auto& [name, t] : leaves) {
    INFO(name);
    std::vector<Tensor> parts;
    for (auto& m : modules)
      parts.push_back(m.mine.parameters.at(name).grad());
    auto slice = modules[0].slices.find(name);
    auto whole = slice == modules[0].slices.end();
    check_near(!whole ? slice->second.merged(parts)
               : same ? same_of_all(parts)
                      : torch::stack(parts).sum(0),
               t.grad(), share);
  }
}

} // namespace

TEST_CASE("layers of T5 compute the same shared as alone",
          "[tp][cross_attention]") {
  uint64_t peers = GENERATE(1, 2, 4);
  auto saves_memory = GENERATE(false, true);
  auto k = GENERATE(kind{}, kind{.decoder = false}, kind{.gated = true},
                    kind{.positions = false},
                    kind{.pre_layernorm = false, .post_layernorm = true},
                    kind{.post_layernorm = true}, kind{.pre_layernorm = false},
                    kind{.decoder = false, .positions = false});
  check(k, peers, torch::kDouble, saves_memory, 1e-11);
}

TEST_CASE("shared layers of T5 drop what they would alone",
          "[tp][cross_attention][R54]") {
  uint64_t peers = GENERATE(1, 2, 4);
  auto saves_memory = GENERATE(false, true);
  auto k = GENERATE(kind{.dropout = 0.3},
                    kind{.gated = true, .positions = false, .dropout = 0.3});
  check(k, peers, torch::kDouble, saves_memory, 1e-11);
}

TEST_CASE("shared layers of T5 have the digits of their types",
          "[tp][cross_attention]") {
  uint64_t peers = GENERATE(2, 4);
  auto saves_memory = GENERATE(false, true);
  check({.gated = true}, peers, torch::kFloat, saves_memory, 2e-5);
  check({.gated = true}, peers, torch::kBFloat16, saves_memory, 1e-1);
}

namespace {

constexpr size_t layers = 3;

/// A decoder: of its layers the first one makes the biases of positions.
std::vector<native_module> decoder_of(bool saves_memory) {
  std::vector<native_module> result;
  for (size_t i = 0; i < layers; ++i)
    result.push_back(
      layer_of({.positions = i == 0}, torch::kDouble, saves_memory));
  return result;
}

struct stack_numbers {
  std::vector<std::vector<Tensor>> tensors; // results and gradients, by peer
  std::vector<std::map<std::string, Tensor>> parameters; // by layer
  std::vector<double> sent;                              // by peer
};

/// @param remembers layers know what others made of tensors
/// @param in_row they hand on hidden states as they have them
stack_numbers run_decoder(const std::vector<native_module>& xs,
                          const arguments& given, uint64_t peers, bool same,
                          bool remembers, bool in_row = false) {
  std::vector<std::vector<shared_module>> modules(peers);
  for (uint64_t i = 0; i < peers; ++i)
    for (auto& x : xs)
      modules[i].push_back(test::share(x, i, peers));
  stack_numbers result;
  result.tensors.resize(peers);
  result.sent.resize(peers);
  thread_group group{peers, same};
  group.on_all([&](uint64_t i) {
    auto own = [&](const std::vector<Tensor>& all) {
      std::vector<Tensor> mine;
      for (auto& y : all)
        mine.push_back(same ? y : y.chunk(static_cast<int64_t>(peers)).at(i));
      return mine;
    };
    entered_tensors known;
    auto& before = tensor_group::current();
    counting_group counted{before, remembers ? &known : nullptr};
    tensor_group::set_current(&counted);
    result.tensors[i] = go(own(given.inputs), own(given.seeds), [&](auto ys) {
      for (size_t k = 0; k < layers; ++k)
        ys = modules[i][k].module->forward_in_row(
          ys, {!in_row || k == 0, !in_row || k + 1 == layers});
      return ys;
    });
    tensor_group::set_current(&before);
    result.sent[i] = counted.bytes();
  });
  for (size_t k = 0; k < xs.size(); ++k) {
    auto& to = result.parameters.emplace_back();
    for (auto& [name, whole] : xs[k].parameters) {
      std::vector<Tensor> parts;
      for (auto& m : modules)
        parts.push_back(m[k].mine.parameters.at(name).grad());
      auto& slices = modules[0][k].slices;
      auto slice = slices.find(name);
      to[name] = slice != slices.end() ? slice->second.merged(parts)
                 : same                ? same_of_all(parts)
                                       : torch::stack(parts).sum(0);
    }
  }
  return result;
}

/// What a rank sends for one layer's mask of heads, context and mask of that,
/// forward and backward.
double bytes_of_shared(uint64_t peers, bool same, bool saves_memory) {
  auto t = static_cast<double>(peers);
  auto own = same ? 1.0 * samples : samples / t; // samples of a rank
  auto mask = own * heads * tokens * tokens;
  auto context = own * seen * width, context_mask = own * seen;
  double numbers = 0;
  if (same) // only gradients, of a part by an allgather, else by an allreduce
    numbers = (t - 1) / t
              * (mask + 2 * context_mask + (saves_memory ? 1 : 2) * context);
  else // a part is 1 / T of it
    numbers = 2 * (t - 1)
              * (mask / t + context_mask + context / (saves_memory ? t : 1));
  return 8 * numbers;
}

} // namespace

TEST_CASE("layers behind each other take masks and a context once",
          "[tp][cross_attention][R50]") {
  uint64_t peers = GENERATE(2, 4);
  auto same = GENERATE(false, true);
  auto saves_memory = GENERATE(false, true);
  CAPTURE(peers, same, saves_memory);
  torch::manual_seed(22);
  auto xs = decoder_of(saves_memory);
  auto given = arguments_of({}, torch::kDouble);
  std::vector<std::map<std::string, Tensor>> leaves;
  for (auto& x : xs) {
    auto& to = leaves.emplace_back(x.parameters);
    for (auto& [name, t] : to)
      t = t.detach().clone().requires_grad_();
  }
  auto expected = go(given.inputs, given.seeds, [&](auto ys) {
    for (size_t k = 0; k < layers; ++k) {
      const kind of{.positions = k == 0};
      ys = plain_layer{of, leaves[k], peers}.run(ys);
    }
    return ys;
  });
  auto mine = run_decoder(xs, given, peers, same, true);
  for (size_t i = 0; i < expected.size(); ++i) {
    INFO("tensor " << i);
    std::vector<Tensor> parts;
    for (auto& ys : mine.tensors)
      parts.push_back(ys.at(i));
    check_near(same ? same_of_all(parts) : torch::cat(parts), expected[i],
               1e-11);
  }
  for (size_t k = 0; k < layers; ++k)
    for (auto& [name, t] : leaves[k]) {
      INFO("layer " << k << ": " << name);
      check_near(mine.parameters[k].at(name), t.grad(), 1e-11);
    }
  // What the second and the third one would have sent.
  auto each = run_decoder(xs, given, peers, same, false);
  auto saved = 2 * bytes_of_shared(peers, same, saves_memory);
  for (uint64_t i = 0; i < peers; ++i)
    CHECK(each.sent[i] - mine.sent[i] == Catch::Approx(saved));
}

namespace {

/// @returns bytes that each peer keeps of a decoder for backward
std::vector<int64_t> kept_of_decoder(const std::vector<native_module>& xs,
                                     const arguments& given, uint64_t peers,
                                     bool remembers) {
  std::vector<std::vector<shared_module>> modules(peers);
  for (uint64_t i = 0; i < peers; ++i)
    for (auto& x : xs)
      modules[i].push_back(test::share(x, i, peers));
  std::vector<int64_t> result(peers);
  thread_group group{peers};
  group.on_all([&](uint64_t i) {
    auto bytes = std::make_shared<live_bytes>();
    c10::DebugInfoGuard guard{c10::DebugInfoKind::PROFILER_STATE, bytes};
    entered_tensors known;
    auto& before = tensor_group::current();
    counting_group counted{before, remembers ? &known : nullptr};
    tensor_group::set_current(&counted);
    std::vector<Tensor> ys;
    for (auto& x : given.inputs) {
      auto leaf = x.chunk(static_cast<int64_t>(peers)).at(i).clone();
      ys.push_back(leaf.requires_grad_() + 0); // a result of other modules
    }
    for (auto& x : modules[i])
      ys = x.module->forward(ys);
    tensor_group::set_current(&before);
    known.clear();
    auto all = bytes->now;
    ys.clear();
    result[i] = all - bytes->now;
  });
  return result;
}

} // namespace

TEST_CASE("a context is kept once for all layers of a decoder",
          "[tp][cross_attention][memory]") {
  uint64_t peers = GENERATE(2, 4);
  auto saves_memory = GENERATE(false, true);
  CAPTURE(peers, saves_memory);
  torch::manual_seed(24);
  auto xs = decoder_of(saves_memory);
  auto given = arguments_of({}, torch::kDouble);
  auto once = kept_of_decoder(xs, given, peers, true);
  auto each = kept_of_decoder(xs, given, peers, false);
  auto parts = saves_memory ? static_cast<int64_t>(peers) : 1;
  auto context = samples * seen * width / parts
                 * static_cast<int64_t>(sizeof(double));
  auto others = static_cast<int64_t>(layers) - 1;
  for (uint64_t i = 0; i < peers; ++i) {
    CAPTURE(once[i], each[i], context);
    CHECK(once[i] > 0);
    CHECK(each[i] - once[i] >= others * context);
  }
}

TEST_CASE("hidden states that nobody sees are not exchanged between layers",
          "[tp][cross_attention][R50]") {
  uint64_t peers = GENERATE(2, 4);
  auto same = GENERATE(false, true);
  CAPTURE(peers, same);
  torch::manual_seed(23);
  auto xs = decoder_of(true);
  auto given = arguments_of({}, torch::kDouble);
  auto seen_by_all = run_decoder(xs, given, peers, same, true);
  auto mine = run_decoder(xs, given, peers, same, true, true);
  for (uint64_t i = 0; i < peers; ++i)
    for (size_t k = 0; k < mine.tensors[i].size(); ++k) {
      INFO("tensor " << k);
      check_near(mine.tensors[i][k], seen_by_all.tensors[i].at(k), 1e-12);
    }
  for (size_t k = 0; k < layers; ++k)
    for (auto& [name, t] : seen_by_all.parameters[k]) {
      INFO("layer " << k << ": " << name);
      check_near(mine.parameters[k].at(name), t, 1e-12);
    }
  // Between two layers, four all-to-alls of own samples; of the same samples an
  // allgather each way.
  auto t = static_cast<double>(peers);
  auto states = 8.0 * samples * tokens * width;
  auto saved = (t - 1) / t * (same ? 2 * states : 4 * states / t);
  for (uint64_t i = 0; i < peers; ++i)
    CHECK(seen_by_all.sent[i] - mine.sent[i]
          == Catch::Approx((layers - 1) * saved));
}

TEST_CASE("a layer whose parameters are not those that were told of says why",
          "[tp][cross_attention]") {
  auto x = layer_of({.gated = true}, torch::kFloat, true);
  auto refusal = [&](int64_t peers) {
    return find_distribution(x.type)->refusal(x, peers);
  };
  CHECK(refusal(2) == "");
  CHECK(refusal(3)
        == "its 4 heads cannot be divided among 3 ranks; 3 or 6 could (its "
           "linears may be)");
  SECTION("one too many") {
    x.parameters["layer.ff.scale"] = torch::ones({1});
    CHECK(refusal(2)
          == "what it computes was told without its parameter "
             "'layer.ff.scale'; its options have to name the module of that");
  }
  SECTION("one too few") {
    x.parameters.erase("layer.cross.k.weight");
    CHECK(refusal(2)
          == "it has no parameter 'layer.cross.k.weight'; its options have to "
             "name one that it has");
  }
  SECTION("another size") {
    x.parameters["layer.cross.k.weight"] = torch::ones({attended, width + 1});
    CHECK(refusal(2)
          == "its 'layer.cross.k' goes from 13 to 20 channels, not from 12 to "
             "20; only a layer with these sizes can be shared as a whole");
  }
  SECTION("another number of axes") {
    x.parameters["layer.ff.wo.weight"] = torch::ones({width});
    CHECK(refusal(2) == "its 'layer.ff.wo.weight' has 1 axes; 2 are expected");
  }
}
