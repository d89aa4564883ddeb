// ctest: seconds=18
#include "tests/support/catch.hpp"

#include "tests/support/torch/counting_group.hpp"
#include "tests/support/torch/thread_group.hpp"
#include "tp/distributions.hpp"
#include "tp/module_options.hpp"
#include "tp/traffic.hpp"

#include <ATen/ops/gelu.h>
#include <torch/csrc/autograd/autograd.h>

#include <memory>
#include <string>
#include <vector>

// How much ranks that share a module are said to send, beside what they give to
// their collectives.

using namespace smp;
using namespace smp::test;
using torch::Tensor;

namespace {

native_module shared_type(const std::string& type) {
  native_module result{type};
  result.how = find_distribution(type);
  return result;
}

/// Forward and backward of a module by peers with these arguments. The first
/// one has a gradient, and others that require one.
/// @returns what it is said to take, and what each peer sent
struct traffic {
  double said = 0;
  std::vector<double> sent;
};

traffic traffic_of(const native_module& x, std::vector<Tensor> xs,
                   uint64_t peers, bool same) {
  traffic result;
  result.sent.resize(peers);
  thread_group group{peers, same};
  nn::traced_calls calls{0, 1, static_cast<int64_t>(peers), same};
  auto& arguments = calls.arguments.emplace_back();
  for (auto& t : xs) {
    calls.bytes += t.nbytes();
    arguments.push_back({t.sizes().vec(),
                         static_cast<uint64_t>(t.element_size()),
                         t.stride(0) == 0, t.requires_grad()});
  }
  uint64_t results = 0;
  group.on_all([&](uint64_t i) {
    auto mine = x;
    auto n = static_cast<int64_t>(peers);
    auto slices = x.how->slices(x, static_cast<int64_t>(i), n);
    for (auto& [name, t] : mine.parameters) {
      auto slice = slices.find(name);
      t = (slice == slices.end() ? t : slice->second.of(t))
            .detach()
            .clone()
            .requires_grad_();
    }
    auto module = x.how->make(mine, slices);
    auto given = xs;
    for (size_t k = 0; k < given.size(); ++k)
      if (auto& t = given[k]; t.requires_grad() || k == 0)
        if (t.is_floating_point())
          t = t.detach().clone().requires_grad_();
    auto& before = tensor_group::current();
    counting_group counted{before};
    tensor_group::set_current(&counted);
    auto y = module->forward(given).at(0);
    y.sum().backward();
    tensor_group::set_current(&before);
    result.sent[i] = counted.bytes();
    if (i == 0)
      results = y.nbytes();
  });
  calls.bytes += results;
  result.said = nn::bytes_sent(x, calls).value();
  return result;
}

void check(const native_module& x, const std::vector<Tensor>& xs) {
  uint64_t peers = GENERATE(2, 4);
  auto same = GENERATE(false, true);
  CAPTURE(x.type, x.saves_memory, peers, same);
  auto found = traffic_of(x, xs, peers, same);
  for (auto y : found.sent)
    CHECK(y == Catch::Approx(found.said));
}

constexpr int64_t width = 16;

native_module layer(bool saves_memory, bool rms, bool gate) {
  transformer_layer_options o;
  o.num_attention_heads = 4;
  o.rms_norm = rms;
  o.activation = [](const Tensor& y) { return at::gelu(y); };
  o.attention_norm = {"ln_1"};
  o.output_norm = {"ln_2"};
  o.query_key_value = {{"qkv", true}};
  o.attention_output = {"proj"};
  o.intermediate = {"up"};
  o.output = {"down"};
  auto result = described(o);
  auto add = [&](const std::string& name, std::vector<int64_t> sizes) {
    result.parameters[name] = torch::randn(sizes);
  };
  if (gate) {
    o.gate = {"gate"};
    result = described(o);
    add("gate.weight", {24, width});
  }
  for (std::string norm : {"ln_1", "ln_2"}) {
    add(norm + ".weight", {width});
    if (!rms)
      add(norm + ".bias", {width});
  }
  add("qkv.weight", {width, 3 * width});
  add("qkv.bias", {3 * width});
  add("proj.weight", {width, width});
  add("up.weight", {24, width});
  add("down.weight", {width, 24});
  result.saves_memory = saves_memory;
  return result;
}

/// A decoder's, of T5, or its encoder's without cross-attention.
struct decoder_kind {
  bool saves_memory = false;
  bool cross = true;
  bool positions = false;
  bool both_norms = false;
};

native_module decoder(const decoder_kind& k) {
  auto result = layer(k.saves_memory, true, false);
  auto add = [&](const std::string& name, std::vector<int64_t> sizes) {
    result.parameters[name + ".weight"] = torch::randn(sizes);
  };
  auto o = *result.layer;
  o.takes_mask = true;
  if (k.cross) {
    auto& cross = o.cross_attention.emplace();
    cross.norm = {"ln_3"};
    cross.query = {"q"};
    cross.key = {"k"};
    cross.value = {"v"};
    cross.output = {"o"};
    cross.post_norm = {"post_3"};
    add("ln_3", {width});
    for (auto* name : {"q", "k", "v"})
      add(name, {20, width}); // together not as wide as hidden states
    add("o", {width, 20});
  }
  if (k.positions) {
    o.positions = {"table", [](const Tensor& table, int64_t n) {
                     return table.select(0, 0)
                       .view({1, -1, 1, 1})
                       .expand({1, table.size(1), n, n});
                   }};
    add("table", {9, 4});
  }
  o.post_layernorm = k.both_norms;
  o.attention_post_norm = {"post_1"};
  o.output_post_norm = {"post_2"};
  if (k.both_norms)
    for (std::string part : {"1", "2", "3"})
      if (k.cross || part != "3")
        add("post_" + part, {width});
  result.layer = std::make_shared<transformer_layer_options>(o);
  return result;
}

constexpr int64_t samples = 4, tokens = 3;

/// Of all that may be added to scores, by which of them it is.
Tensor mask_of(int which) {
  auto learned = [](Tensor x) { return x.requires_grad_(); };
  switch (which) {
    case 0:
      return torch::randn({samples, 1, 1, tokens});
    case 1:
      return learned(torch::randn({samples, 1, tokens, tokens}));
    case 2:
      return learned(torch::randn({samples, 4, tokens, tokens}));
    case 3:
      return learned(torch::randn({1, 4, tokens, tokens}));
    case 4:
      return torch::ones({tokens, tokens}, torch::kBool).tril();
    default:
      return torch::randn({1, 4, tokens, tokens})
        .expand({samples, 4, tokens, tokens});
  }
}

} // namespace

TEST_CASE("what peers send for a Linear is what is said", "[tp][traffic]") {
  auto x = shared_type("Linear");
  x.parameters["weight"] = torch::randn({6, 8});
  x.parameters["bias"] = torch::randn({6});
  check(x, {torch::randn({4, 3, 8})});
  auto large = shared_type("Linear"); // in segments
  large.parameters["weight"] = torch::randn({2048, 8});
  check(large, {torch::randn({1040, 8})});
  auto y = shared_type("Conv1D");
  y.parameters["weight"] = torch::randn({8, 6}, torch::kDouble);
  check(y, {torch::randn({4, 3, 8}, torch::kDouble)});
}

TEST_CASE("what peers send for an Embedding is what is said", "[tp][traffic]") {
  auto x = shared_type("Embedding");
  auto channels = GENERATE(8, 3); // by channels, by rows
  x.parameters["weight"] = torch::randn({20, channels});
  check(x, {torch::randint(20, {4, 5}, torch::kLong)});
}

TEST_CASE("what peers send for a LayerNorm is what is said", "[tp][traffic]") {
  auto x = shared_type("LayerNorm");
  x.normalized_shape = {3, 8};
  auto type = GENERATE(torch::kFloat, torch::kBFloat16, torch::kDouble);
  x.parameters["weight"] = torch::ones({3, 8}, type);
  x.parameters["bias"] = torch::zeros({3, 8}, type);
  check(x, {torch::randn({4, 2, 3, 8}, torch::kFloat).to(type)});
}

TEST_CASE("what peers send for a transformer layer is what is said",
          "[tp][traffic]") {
  auto saves_memory = GENERATE(false, true);
  auto rms = GENERATE(false, true);
  auto gate = GENERATE(false, true);
  CAPTURE(rms, gate);
  check(layer(saves_memory, rms, gate), {torch::randn({4, 3, width})});
}

TEST_CASE("what peers send for masks is what is said", "[tp][traffic]") {
  decoder_kind k{.saves_memory = GENERATE(false, true), .cross = false};
  k.positions = GENERATE(false, true);
  auto which = GENERATE(range(0, 6));
  CAPTURE(k.positions, which);
  check(decoder(k), {torch::randn({samples, tokens, width}), mask_of(which)});
}

TEST_CASE("what peers send for a layer with cross-attention is what is said",
          "[tp][traffic]") {
  decoder_kind k{.saves_memory = GENERATE(false, true)};
  k.positions = GENERATE(false, true);
  k.both_norms = GENERATE(false, true);
  CAPTURE(k.positions, k.both_norms);
  auto context = torch::randn({samples, 5, width}).requires_grad_();
  std::vector<Tensor> xs{torch::randn({samples, tokens, width}), mask_of(0),
                         context};
  SECTION("without a mask of the context") {
    check(decoder(k), xs);
  }
  SECTION("with one") {
    xs.push_back(torch::randn({samples, 1, 1, 5}));
    check(decoder(k), xs);
  }
}

TEST_CASE("what peers send for a half of a layer is what is said",
          "[tp][traffic]") {
  auto saves_memory = GENERATE(false, true);
  auto attends = GENERATE(false, true);
  auto whole = layer(saves_memory, false, !attends);
  native_module half;
  if (attends) {
    attention_layer_options o;
    o.num_attention_heads = 4;
    o.norm = {"ln_1"};
    o.query_key_value = {{"qkv", true}};
    o.output = {"proj"};
    half = described(o);
  } else {
    transformer_output_layer_options o;
    o.activation = whole.layer->activation;
    o.norm = {"ln_2"};
    o.intermediate = {"up"};
    o.gate = {"gate"};
    o.output = {"down"};
    half = described(o);
  }
  half.saves_memory = saves_memory;
  for (auto& [name, t] : whole.parameters)
    if (attends == (name[0] == 'q' || name[0] == 'p' || name[3] == '1'))
      half.parameters[name] = t;
  check(half, {torch::randn({4, 3, width})});
}

TEST_CASE("what peers send for a last layer is what is said",
          "[tp][traffic][R59]") {
  auto x = described(lm_head_options{});
  x.parameters["weight"] = torch::randn({20, 8});
  check(x,
        {torch::randn({4, 3, 8}), torch::randint(20, {4, 3}).to(torch::kLong)});
  // Logits alone count the same: their loss is expected to be wanted.
  nn::traced_calls with_loss{4 * 3 * (4 * 8 + 8) + 4, 1, 2, false};
  nn::traced_calls logits{4 * 3 * 4 * (8 + 20), 1, 2, false};
  CHECK(nn::bytes_sent(x, with_loss) == nn::bytes_sent(x, logits));
}

TEST_CASE("nothing is said of what hides what it exchanges", "[tp][traffic]") {
  nn::traced_calls calls{1000, 1, 2, false};
  auto hooked = described(linear_options{.weight = "kernel"});
  hooked.parameters["weight"] = torch::randn({6, 8});
  CHECK_FALSE(nn::bytes_sent(hooked, calls));
  CHECK_FALSE(nn::bytes_sent(native_module{"pair"}, calls));
  // A layer that takes something else.
  auto x = decoder({});
  CHECK_FALSE(nn::bytes_sent(x, calls));
  nn::traced_argument hidden{{4, 3, width}, 4}, other{{4, 3, width + 1}, 4};
  calls.arguments = {{hidden, hidden}};
  CHECK_FALSE(nn::bytes_sent(x, calls));
  calls.arguments = {{hidden, hidden, other}};
  CHECK_FALSE(nn::bytes_sent(x, calls));
  calls.arguments = {{hidden, hidden, hidden}};
  CHECK(nn::bytes_sent(x, calls));
}
