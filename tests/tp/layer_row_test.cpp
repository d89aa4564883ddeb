#include "tests/support/catch.hpp"

#include "tests/support/torch/counting_group.hpp"
#include "tests/support/torch/near.hpp"
#include "tests/support/torch/peers.hpp"
#include "tp/traffic.hpp"
#include "tp/transformer/transformer_layer_options.hpp"

#include <ATen/ops/dropout.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/softmax.h>
#include <torch/types.h>

#include <cmath>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

// Layers for memory in a row: hidden states are exchanged before the first one
// and behind the last one, and nowhere between.

using namespace smp;
using namespace smp::test;
using torch::Tensor;

namespace {

constexpr int64_t heads = 4;
constexpr int64_t width = 16;
constexpr int64_t inner = 24;
constexpr int64_t tokens = 5;
constexpr int64_t samples = 8;
constexpr size_t layers = 3;

using parameters = std::map<std::string, Tensor>;

native_module layer_of(size_t i, double dropout, bool saves_memory) {
  transformer_layer_options o;
  o.num_attention_heads = heads;
  o.activation = [](const Tensor& x) { return at::gelu(x); };
  o.attention_norm = {"ln_1"};
  o.output_norm = {"ln_2"};
  o.query_key_value = {{"attn.q"}, {"attn.k"}, {"attn.v"}};
  o.attention_output = {"attn.proj"};
  o.intermediate = {"mlp.up"};
  o.output = {"mlp.down"};
  o.attention_dropout = {"attn", dropout};
  o.attention_output_dropout = {"attn.drop", dropout};
  o.output_dropout = {"mlp.drop", dropout};
  native_module x{"TransformerLayer"};
  x.name = "h." + std::to_string(i);
  x.saves_memory = saves_memory;
  auto linear = [&](const std::string& name, int64_t in, int64_t out) {
    x.parameters[name + ".weight"] = torch::randn({out, in}, torch::kDouble)
                                     / std::sqrt(static_cast<double>(in));
    x.parameters[name + ".bias"] = torch::randn({out}, torch::kDouble);
  };
  for (auto* name : {"attn.q", "attn.k", "attn.v", "attn.proj"})
    linear(name, width, width);
  linear("mlp.up", width, inner);
  linear("mlp.down", inner, width);
  for (std::string norm : {"ln_1", "ln_2"}) {
    x.parameters[norm + ".weight"] = torch::randn({width}, torch::kDouble);
    x.parameters[norm + ".bias"] = torch::randn({width}, torch::kDouble);
  }
  x.layer = std::make_shared<transformer_layer_options>(std::move(o));
  return x;
}

std::vector<native_module> stack_of(double dropout, bool saves_memory) {
  std::vector<native_module> result;
  for (size_t i = 0; i < layers; ++i)
    result.push_back(layer_of(i, dropout, saves_memory));
  return result;
}

/// The formula of a layer.
class plain_layer {
public:
  /// @param batches whose samples draw for themselves
  plain_layer(std::string name, const parameters& p, double dropout,
              uint64_t batches)
    : name_(std::move(name)), p_(p), dropout_(dropout), batches_(batches) {
    // nop
  }

  Tensor run(const Tensor& x) const {
    auto y = x
             + drop(linear(attend(norm(x, "ln_1")), "attn.proj"), "attn.drop");
    auto h = at::gelu(linear(norm(y, "ln_2"), "mlp.up"));
    return y + drop(linear(h, "mlp.down"), "mlp.drop");
  }

private:
  Tensor linear(const Tensor& x, const std::string& name) const {
    return at::linear(x, p_.at(name + ".weight"), p_.at(name + ".bias"));
  }

  Tensor norm(const Tensor& x, const std::string& name) const {
    return at::layer_norm(x, {width}, p_.at(name + ".weight"),
                          p_.at(name + ".bias"), 1e-5);
  }

  Tensor drop(const Tensor& x, const std::string& name) const {
    if (dropout_ == 0)
      return x;
    std::vector<Tensor> parts;
    for (auto& y : x.chunk(static_cast<int64_t>(batches_), 0)) {
      torch::manual_seed(
        thread_group::seed_of(parts.size(), name_ + "." + name));
      parts.push_back(at::dropout(y.contiguous(), dropout_, true));
    }
    return torch::cat(parts, 0);
  }

  Tensor attend(const Tensor& x) const {
    auto part = [&](const char* name) {
      return linear(x, name).view({samples, tokens, heads, -1}).transpose(1, 2);
    };
    auto q = part("attn.q"), k = part("attn.k"), v = part("attn.v");
    auto scores = q.matmul(k.transpose(2, 3))
                  / std::sqrt(static_cast<double>(width / heads));
    auto y = drop(at::softmax(scores, -1), "attn").matmul(v);
    return y.transpose(1, 2).flatten(2);
  }

  std::string name_;
  const parameters& p_;
  double dropout_;
  uint64_t batches_;
};

struct stack_numbers {
  Tensor output, input_grad;
  std::vector<parameters> grads; // by layer
  std::vector<double> sent = {}; // by peer
};

struct samples_and_seed {
  Tensor input = torch::randn({samples, tokens, width}, torch::kDouble);
  Tensor seed = torch::randn({samples, tokens, width}, torch::kDouble);
};

stack_numbers plain_stack(const std::vector<native_module>& xs,
                          const samples_and_seed& given, double dropout,
                          uint64_t batches) {
  std::vector<parameters> leaves;
  for (auto& x : xs)
    for (auto& [name, t] : leaves.emplace_back(x.parameters))
      t = t.detach().clone().requires_grad_();
  auto input = given.input.clone().requires_grad_();
  auto y = input;
  for (size_t k = 0; k < layers; ++k)
    y = plain_layer{xs[k].name, leaves[k], dropout, batches}.run(y);
  y.backward(given.seed);
  stack_numbers result{y.detach(), input.grad(), {}};
  for (auto& leaf : leaves)
    for (auto& [name, t] : result.grads.emplace_back(leaf))
      t = leaf.at(name).grad();
  return result;
}

/// Shared by peers, in a row.
stack_numbers shared_stack(const std::vector<native_module>& xs,
                           const samples_and_seed& given, uint64_t peers,
                           bool same) {
  std::vector<std::vector<shared_module>> modules(peers);
  for (uint64_t i = 0; i < peers; ++i)
    for (auto& x : xs)
      modules[i].push_back(share(x, i, peers));
  stack_numbers result;
  result.sent.resize(peers);
  std::vector<Tensor> outputs(peers), input_grads(peers);
  thread_group group{peers, same};
  group.on_all([&](uint64_t i) {
    auto own = [&](const Tensor& x) {
      return same ? x : x.chunk(static_cast<int64_t>(peers)).at(i);
    };
    auto& before = tensor_group::current();
    counting_group counted{before};
    tensor_group::set_current(&counted);
    auto input = own(given.input).detach().clone().requires_grad_();
    std::vector<Tensor> ys{input};
    for (size_t k = 0; k < layers; ++k)
      ys = modules[i][k].module->forward_in_row(ys, {k == 0, k + 1 == layers});
    ys.at(0).backward(own(given.seed));
    tensor_group::set_current(&before);
    outputs[i] = ys[0].detach();
    input_grads[i] = input.grad();
    result.sent[i] = counted.bytes();
  });
  auto all_of = [&](const std::vector<Tensor>& parts) {
    return same ? same_of_all(parts) : torch::cat(parts);
  };
  result.output = all_of(outputs);
  result.input_grad = all_of(input_grads);
  for (size_t k = 0; k < layers; ++k) {
    auto& to = result.grads.emplace_back();
    for (auto& [name, whole] : xs[k].parameters) {
      std::vector<Tensor> parts;
      for (auto& m : modules) {
        auto& p = m[k].mine.parameters.at(name);
        parts.push_back(p.grad().defined() ? p.grad() : torch::zeros_like(p));
      }
      auto& slices = modules[0][k].slices;
      auto slice = slices.find(name);
      to[name] = slice != slices.end() ? slice->second.merged(parts)
                 : same                ? same_of_all(parts)
                                       : torch::stack(parts).sum(0);
    }
  }
  return result;
}

/// What a rank sends for a layer that stands alone, forward and backward.
double bytes_alone(const native_module& x, uint64_t peers, bool same) {
  auto n = same ? samples : samples / static_cast<int64_t>(peers);
  nn::traced_calls calls;
  calls.peers = static_cast<int64_t>(peers);
  calls.same_samples = same;
  nn::traced_argument states;
  states.sizes = {n, tokens, width};
  states.element_bytes = sizeof(double);
  states.has_gradient = true;
  calls.arguments.emplace_back().push_back(states);
  return nn::bytes_sent(x, calls).value();
}

} // namespace

TEST_CASE("a row of layers exchanges hidden states at its ends alone",
          "[tp][layer_row][R50][R54]") {
  uint64_t peers = GENERATE(2, 4);
  auto same = GENERATE(false, true);
  auto dropout = GENERATE(0.0, 0.3);
  CAPTURE(peers, same, dropout);
  torch::manual_seed(25);
  auto xs = stack_of(dropout, true);
  const samples_and_seed given{};
  auto expected = plain_stack(xs, given, dropout, same ? 1 : peers);
  auto mine = shared_stack(xs, given, peers, same);
  check_near(mine.output, expected.output, 1e-11);
  check_near(mine.input_grad, expected.input_grad, 1e-11);
  for (size_t k = 0; k < layers; ++k)
    for (auto& [name, x] : expected.grads[k]) {
      INFO("layer " << k << ": " << name);
      check_near(mine.grads[k].at(name), x, 1e-11);
    }
  // Each way, an all-to-all of own samples at each end of a layer; of the same
  // samples, an allgather at one.
  auto t = static_cast<double>(peers);
  auto ends = 8.0 * samples * tokens * width * (t - 1) / t * (same ? 2 : 4 / t);
  auto bytes = layers * bytes_alone(xs[0], peers, same) - (layers - 1) * ends;
  for (auto sent : mine.sent)
    CHECK(sent == Catch::Approx(bytes));
}

TEST_CASE("only layers for memory stand in rows", "[tp][layer_row]") {
  auto saves_memory = GENERATE(false, true);
  auto x = share(layer_of(0, 0, saves_memory), 0, 2);
  CHECK(x.module->stands_in_rows() == saves_memory);
}
