#pragma once

// The habits of tests/zoo in torch::nn models. A model is written once: with
// `split` its members are smp::submodule, with `plain` those of torch::nn, so
// the reference has nothing of runtime/ (R36), and the member types are the
// only difference between the two.

#include "runtime/intercept/submodule.hpp"

#include <torch/nn/functional/activation.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/modules/rnn.h>

#include <fmt/format.h>

#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

namespace smp::test::nn_zoo {

namespace nn = torch::nn;
namespace F = torch::nn::functional;

using torch::Tensor;

using batch = std::vector<Tensor>;

struct plain {
  template <class Holder>
  using part = Holder;
};

struct split {
  template <class Holder>
  using part = submodule<Holder>;
};

/// One of these modules as a part of another one.
template <class K, template <class> class Impl>
using own = typename K::template part<nn::ModuleHolder<Impl<K>>>;

template <class K>
using linear = typename K::template part<nn::Linear>;

inline constexpr int64_t rows = 8, width = 12, words = 29, num_classes = 5;

inline Tensor vectors(int64_t n = width) {
  return torch::randn({rows, n});
}

inline Tensor labels() {
  return torch::randint(num_classes, {rows}, torch::kLong);
}

inline Tensor tokens(int64_t length = 6) {
  return torch::randint(words, {rows, length}, torch::kLong);
}

inline Tensor next_word_loss(const Tensor& logits, const Tensor& x) {
  auto n = logits.size(1) - 1;
  return F::cross_entropy(logits.narrow(1, 0, n).flatten(0, 1),
                          x.narrow(1, 1, n).flatten());
}

// -- chains and trees ---------------------------------------------------------

template <class K>
struct level : nn::Module {
  level() {
    register_module("norm", norm);
    register_module("fc", fc);
  }
  Tensor forward(Tensor x) {
    return x + torch::tanh(fc(norm(x)));
  }
  typename K::template part<nn::LayerNorm> norm{nn::LayerNormOptions({width})};
  linear<K> fc{width, width};
};

/// A Sequential, and what the first block gives used again by the last one.
template <class K>
struct skip_link : nn::Module {
  skip_link() {
    register_module("first", first);
    register_module("middle", middle);
    register_module("last", last);
  }
  Tensor forward(const batch& in) {
    auto start = torch::relu(first(in[0]));
    auto h = middle->forward(start);
    return F::cross_entropy(last(torch::cat({h, start}, -1)), in[1]);
  }
  static batch inputs() {
    return {vectors(), labels()};
  }
  linear<K> first{width, width};
  nn::Sequential middle{nn::Linear(width, 20), nn::GELU(),
                        nn::Linear(20, width), nn::Tanh()};
  linear<K> last{2 * width, num_classes};
};

template <class K>
struct tower : nn::Module {
  explicit tower(int64_t n) : fc(n, 16) {
    register_module("fc", fc);
    register_module("out", out);
  }
  Tensor forward(Tensor x) {
    return out(torch::relu(fc(x)));
  }
  linear<K> fc;
  linear<K> out{16, 8};
};

template <class K>
struct two_towers : nn::Module {
  two_towers() : scale(register_parameter("scale", torch::tensor(1.5f))) {
    register_module("query", query);
    register_module("item", item);
  }
  Tensor forward(const batch& in) {
    auto score = (query(in[0]) * item(in[1])).sum(-1) * scale;
    return F::binary_cross_entropy_with_logits(score, in[2]);
  }
  static batch inputs() {
    return {vectors(), vectors(10),
            torch::randint(2, {rows}).to(torch::kFloat)};
  }
  own<K, tower> query{width}, item{10};
  Tensor scale;
};

// -- what depends on data -----------------------------------------------------

template <class K>
struct branch : nn::Module {
  branch() {
    register_module("low", low);
    register_module("high", high);
    register_module("head", head);
  }
  Tensor forward(const batch& in) {
    auto h = in[0].sum().item<float>() > 0 ? high(in[0]) : low(in[0]);
    return F::cross_entropy(head(h), in[1]);
  }
  static batch inputs() {
    auto x = vectors(); // the microbatches of two rows go high, low, high, low
    for (int64_t i = 0; i < rows; ++i)
      x[i] += i % 4 < 2 ? 1 : -1;
    return {x, labels()};
  }
  own<K, level> low, high;
  linear<K> head{width, num_classes};
};

template <class K>
struct early_exit : nn::Module {
  early_exit() {
    for (int i = 0; i < 4; ++i) {
      levels.push_back(
        register_module(fmt::format("level{}", i), own<K, level>{}));
      exits.push_back(register_module(fmt::format("exit{}", i),
                                      linear<K>{width, num_classes}));
    }
  }
  Tensor forward(const batch& in) {
    auto h = in[0];
    Tensor loss;
    for (size_t i = 0; i < levels.size(); ++i) {
      h = levels[i](h);
      Tensor logits = exits[i](h);
      auto more = F::cross_entropy(logits, in[1]);
      loss = loss.defined() ? loss + more : more;
      auto sure = logits.detach().softmax(-1).amax(-1).mean().item<float>();
      if (sure > 0.40f)
        break;
    }
    return loss;
  }
  static batch inputs() {
    auto scale = torch::tensor({0.3, 0.3, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0});
    return {vectors() * scale.to(torch::kFloat).unsqueeze(-1), labels()};
  }
  std::vector<own<K, level>> levels;
  std::vector<linear<K>> exits;
};

/// Each row goes to one expert; who gets no row is called with none, or not.
template <class K>
struct experts : nn::Module {
  experts() {
    register_module("router", router);
    for (int i = 0; i < 4; ++i)
      parts.push_back(
        register_module(fmt::format("expert{}", i), own<K, level>{}));
    register_module("head", head);
  }
  Tensor forward(const batch& in) {
    auto& x = in[0];
    auto [weight, chosen] = router(x).softmax(-1).max(-1);
    auto out = torch::zeros_like(x);
    for (size_t i = 0; i < parts.size(); ++i) {
      auto mine = (chosen == static_cast<int64_t>(i)).nonzero().squeeze(-1);
      if (i < 2 || mine.numel() > 0)
        out = out.index_add(0, mine, parts[i](x.index_select(0, mine)));
    }
    return F::cross_entropy(head(x + out * weight.unsqueeze(-1)), in[1]);
  }
  static batch inputs() {
    return {vectors(), labels()};
  }
  linear<K> router{width, 4};
  std::vector<own<K, level>> parts;
  linear<K> head{width, num_classes};
};

// -- who is called, and how often ---------------------------------------------

template <class K>
struct reused : nn::Module {
  reused() {
    register_module("body", body);
    register_module("between", between);
    register_module("again", body);
    register_module("head", head);
  }
  Tensor forward(const batch& in) {
    auto h = body(torch::relu(between(body(body(in[0])))));
    return F::cross_entropy(head(h), in[1]);
  }
  static batch inputs() {
    return {vectors(), labels()};
  }
  own<K, level> body;
  linear<K> between{width, width};
  linear<K> head{width, num_classes};
};

template <class K>
struct pair_of : nn::Module {
  pair_of() {
    register_module("left", left);
    register_module("right", right);
  }
  std::tuple<Tensor, Tensor> forward(Tensor x) {
    return {torch::tanh(left(x)), torch::tanh(right(x))};
  }
  linear<K> left{width, width}, right{width, width};
};

template <class K>
struct unused_output : nn::Module {
  unused_output() {
    register_module("first", first);
    register_module("dead", dead);
    register_module("looked_at", looked_at);
    register_module("never", never);
    register_module("head", head);
  }
  Tensor forward(const batch& in) {
    auto used = std::get<0>(first(in[0]));
    dead(used);
    Tensor seen = looked_at(used).detach();
    auto sign = seen.norm().item<float>() > 0 ? 1 : -1;
    return F::cross_entropy(head(used) * sign, in[1]);
  }
  static batch inputs() {
    return {vectors(), labels()};
  }
  own<K, pair_of> first, dead;
  linear<K> looked_at{width, width}, never{width, width};
  linear<K> head{width, num_classes};
};

/// An adapter between two frozen blocks.
template <class K>
struct frozen_trunk : nn::Module {
  frozen_trunk() {
    register_module("table", table);
    register_module("low", low);
    register_module("adapter", adapter);
    register_module("high", high);
    register_module("head", head);
    for (auto& m : {table.ptr()->parameters(), low.ptr()->parameters(),
                    high.ptr()->parameters()})
      for (auto p : m)
        p.set_requires_grad(false);
  }
  Tensor forward(const batch& in) {
    auto x = low(table(in[0]));
    return F::cross_entropy(head(high(x + adapter(x)).mean(1)), in[1]);
  }
  static batch inputs() {
    return {tokens(), labels()};
  }
  typename K::template part<nn::Embedding> table{words, width};
  own<K, level> low, high;
  linear<K> adapter{width, width};
  linear<K> head{width, num_classes};
};

// -- arguments and results ----------------------------------------------------

/// Dicts, lists, options, strings and numbers.
template <class K>
struct takes_all : nn::Module {
  using dict = std::map<std::string, Tensor>;

  takes_all() {
    register_module("fc", fc);
    register_module("gate", gate);
  }
  std::tuple<dict, std::vector<Tensor>, std::optional<Tensor>>
  forward(dict features, std::vector<Tensor> history,
          std::optional<Tensor> bias, std::string kind, double scale,
          bool gated) {
    auto x = fc(features.at("x")) * scale;
    if (bias)
      x = x + *bias;
    x = kind == "tanh" ? torch::tanh(x) : torch::relu(x);
    for (auto& h : history)
      x = x + 0.25 * h;
    std::optional<Tensor> g;
    if (gated)
      g = torch::sigmoid(gate(x));
    return {{{"x", x}, {"was", features.at("x")}}, {x * 2, x + 1}, g};
  }
  linear<K> fc{width, width}, gate{width, 1};
};

template <class K>
struct arguments : nn::Module {
  arguments() {
    register_module("a", a);
    register_module("b", b);
    register_module("head", head);
  }
  Tensor forward(const batch& in) {
    using dict = typename takes_all<K>::dict;
    auto [features, history, none] = a(
      dict{{"x", in[0]}}, std::vector<Tensor>{}, std::optional<Tensor>{},
      std::string{"tanh"}, 1.0, false);
    if (none)
      return {};
    auto [last, more, gate] = b(features, history, std::optional<Tensor>{in[0]},
                                std::string{"relu"}, 0.7, true);
    auto h = (last.at("x") + last.at("was")) * gate.value() + more.at(1);
    return F::cross_entropy(head(h), in[1]);
  }
  static batch inputs() {
    return {vectors(), labels()};
  }
  own<K, takes_all> a, b;
  linear<K> head{width, num_classes};
};

template <class K>
struct writes_argument : nn::Module {
  writes_argument() {
    register_module("fc", fc);
  }
  Tensor forward(Tensor x) {
    auto change = torch::tanh(fc(x.clone()));
    x.mul_(0.5).add_(change);
    return x;
  }
  linear<K> fc{width, width};
};

template <class K>
struct in_place : nn::Module {
  in_place() {
    register_module("first", first);
    register_module("writes", writes);
    register_module("relu", relu);
    register_module("head", head);
  }
  Tensor forward(const batch& in) {
    auto h = first(in[0]) * 1.5;
    writes(h.narrow(1, 0, width)); // through a view
    auto k = h + 0.1;
    relu(k);
    return F::cross_entropy(head(h + k), in[1]);
  }
  static batch inputs() {
    return {vectors(), labels()};
  }
  linear<K> first{width, 2 * width};
  own<K, writes_argument> writes;
  typename K::template part<nn::ReLU> relu{nn::ReLUOptions(true)};
  linear<K> head{2 * width, num_classes};
};

// -- state --------------------------------------------------------------------

template <class K>
struct convnet : nn::Module {
  convnet() {
    register_module("body", body);
    register_module("norm", norm);
    register_module("head", head);
  }
  Tensor forward(const batch& in) {
    auto h = torch::relu(norm(body->forward(in[0])));
    return F::cross_entropy(head(h.flatten(1)), in[1]);
  }
  static batch inputs() {
    return {torch::randn({rows, 2, 6, 6}), labels()};
  }
  nn::Sequential body{
    nn::Conv2d(nn::Conv2dOptions(2, 6, 3).padding(1).bias(false)),
    nn::BatchNorm2d(6), nn::ReLU(nn::ReLUOptions(true)),
    nn::Conv2d(nn::Conv2dOptions(6, 4, 3).stride(2))};
  typename K::template part<nn::BatchNorm2d> norm{4};
  linear<K> head{16, num_classes};
};

/// Runs without gradients and counts how often.
template <class K>
struct teacher_net : nn::Module {
  teacher_net()
    : calls(register_buffer("calls", torch::zeros({}, torch::kLong))) {
    register_module("fc", fc);
    register_module("out", out);
  }
  Tensor forward(Tensor x) {
    calls += 1;
    return (out(torch::tanh(fc(x))) / (1 + 0.1 * calls)).softmax(-1);
  }
  linear<K> fc{width, 16}, out{16, num_classes};
  Tensor calls;
};

template <class K>
struct distillation : nn::Module {
  distillation() {
    register_module("teacher", teacher);
    register_module("student", student);
    register_module("head", head);
  }
  Tensor forward(const batch& in) {
    Tensor target;
    {
      torch::NoGradGuard no_grad;
      target = teacher(in[0]);
    }
    return F::cross_entropy(head(torch::relu(student(in[0]))), target);
  }
  static batch inputs() {
    return {vectors()};
  }
  own<K, teacher_net> teacher;
  linear<K> student{width, width};
  linear<K> head{width, num_classes};
};

// -- what LibTorch brings -----------------------------------------------------

template <class K>
struct recurrent : nn::Module {
  recurrent() {
    register_module("table", table);
    register_module("lstm", lstm);
    register_module("gru", gru);
    register_module("head", head);
  }
  Tensor forward(const batch& in) {
    auto [x, state] = lstm(table(in[0]));
    auto y = std::get<0>(gru(x, std::get<0>(state).narrow(0, 1, 1)));
    return next_word_loss(head(y), in[0]);
  }
  static batch inputs() {
    return {tokens()};
  }
  typename K::template part<nn::Embedding> table{words, width};
  typename K::template part<nn::LSTM> lstm{
    nn::LSTMOptions(width, 8).num_layers(2).batch_first(true)};
  typename K::template part<nn::GRU> gru{
    nn::GRUOptions(8, 8).batch_first(true)};
  linear<K> head{8, words};
};

/// Attention over what another part made; the table is the head, too.
template <class K>
struct encoder_decoder : nn::Module {
  encoder_decoder() {
    register_module("table", table);
    register_module("encoder", encoder);
    register_module("look_back", look_back);
    register_module("decoder", decoder);
  }
  Tensor forward(const batch& in) {
    auto memory = encoder(table(in[0])).transpose(0, 1);
    auto x = table(in[1]).transpose(0, 1);
    auto seen = std::get<0>(look_back(x, memory, memory));
    auto y = decoder((x + seen).transpose(0, 1));
    return next_word_loss(at::linear(y, table->weight), in[1]);
  }
  static batch inputs() {
    return {tokens(), tokens(5)};
  }
  typename K::template part<nn::Embedding> table{words, width};
  own<K, level> encoder, decoder;
  typename K::template part<nn::MultiheadAttention> look_back{
    nn::MultiheadAttentionOptions(width, 2)};
};

} // namespace smp::test::nn_zoo
