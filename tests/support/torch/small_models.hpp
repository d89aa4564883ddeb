#pragma once

// One model for each way in which execution may depend on data or leave the
// straight path; for tests/support/torch/models.hpp.

#include "runtime/intercept/submodule.hpp"

#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <variant>
#include <vector>

namespace smp::test {

using torch::Tensor;
using torch::nn::BatchNorm1d;
using torch::nn::Dropout;
using torch::nn::Embedding;
using torch::nn::Linear;

constexpr int64_t width = 6;

/// Registers what a model is made of under its name.
#define SMP_PART(member) register_module(#member, member)

// -- control flow -------------------------------------------------------------

template <template <class> class P>
struct branch : torch::nn::Module {
  branch() {
    SMP_PART(first), SMP_PART(positive), SMP_PART(negative);
  }
  Tensor forward(Tensor x) {
    auto h = first(x);
    h = h.sum().template item<double>() > 0 ? positive(h) : negative(h).relu();
    return h.square().mean();
  }
  P<Linear> first{width, width}, positive{width, width}, negative{width, width};
};

template <template <class> class P>
struct early_exit : torch::nn::Module {
  early_exit() {
    for (int i = 0; i < 5; ++i)
      layers->push_back(P<Linear>(width, width));
    SMP_PART(layers), SMP_PART(head);
  }
  Tensor forward(Tensor x) {
    for (auto& layer : *layers) {
      x = layer->template as<typename P<Linear>::ContainedType>()->forward(x);
      if (x.abs().max().template item<double>() < 1.2)
        break;
      x = torch::tanh(x) * 2;
    }
    return head(x).square().mean();
  }
  torch::nn::ModuleList layers;
  P<Linear> head{width, 1};
};

template <template <class> class P>
struct reused : torch::nn::Module {
  reused() {
    SMP_PART(again), SMP_PART(norm), SMP_PART(between);
  }
  Tensor forward(Tensor x) {
    for (int i = 0; i < 3; ++i)
      x = norm(torch::tanh(again(x)) + between(x));
    return (again(x) * x).mean();
  }
  P<Linear> again{width, width};
  P<torch::nn::LayerNorm> norm{
    torch::nn::LayerNormOptions(std::vector<int64_t>{width})};
  P<Linear> between{width, width};
};

/// `never` is never called, `rarely` in some microbatches only.
template <template <class> class P>
struct sometimes : torch::nn::Module {
  sometimes() {
    SMP_PART(always), SMP_PART(never), SMP_PART(rarely);
  }
  Tensor forward(Tensor x) {
    auto h = always(x);
    if (x[0][0].template item<double>() > 0)
      h = h + rarely(h);
    return h.square().sum();
  }
  P<Linear> always{width, width}, never{width, width}, rarely{width, width};
};

/// Sizes that differ between microbatches, down to no rows at all.
template <template <class> class P>
struct sizes : torch::nn::Module {
  sizes() {
    SMP_PART(first), SMP_PART(second);
  }
  Tensor forward(Tensor x) {
    auto h = first(x);
    auto rows = h.index({x.select(1, 0) > 0});
    return second(rows).sum() + h.mean();
  }
  P<Linear> first{width, width}, second{width, width};
};

// -- results and gradients ----------------------------------------------------

template <template <class> class P>
struct outputs_part : torch::nn::Module {
  outputs_part() {
    register_parameter("weight", weight);
  }
  std::tuple<Tensor, Tensor, int64_t, std::vector<Tensor>> forward(Tensor x) {
    auto y = x * weight;
    return {y,
            y.detach() + 1,
            y.argmax().template item<int64_t>(),
            {y.sum(0), y.sign(), y.exp()}};
  }
  Tensor weight = torch::linspace(0.5, 1.5, width);
};

/// Several outputs, of which some have a gradient, some are not used, and one
/// is used without its gradient.
template <template <class> class P>
struct outputs : torch::nn::Module {
  outputs() {
    SMP_PART(first), SMP_PART(several), SMP_PART(unused), SMP_PART(stopped);
  }
  Tensor forward(Tensor x) {
    auto h = first(x);
    auto [y, constant, index, list] = several(h);
    unused(h); // its result is dropped
    auto z = stopped(y).detach();
    return (y * constant + z).mean() * static_cast<double>(1 + index % 3)
           + list.at(0).square().sum();
  }
  P<Linear> first{width, width};
  P<torch::nn::ModuleHolder<outputs_part<P>>> several;
  P<Linear> unused{width, width}, stopped{width, width};
};

/// Integers have no gradient; the first module has only such inputs.
template <template <class> class P>
struct integers : torch::nn::Module {
  integers() {
    SMP_PART(table), SMP_PART(head);
  }
  Tensor forward(Tensor x) {
    auto tokens = (x.abs() * 10).to(torch::kLong) % 11;
    return torch::nn::functional::cross_entropy(head(table(tokens).mean(1)),
                                                tokens.select(1, 0));
  }
  P<Embedding> table{11, width};
  P<Linear> head{width, 11};
};

template <template <class> class P>
struct frozen : torch::nn::Module {
  frozen() {
    SMP_PART(before), SMP_PART(trunk), SMP_PART(half), SMP_PART(head);
    for (auto& p : trunk->parameters())
      p.set_requires_grad(false);
    half->bias.set_requires_grad(false);
  }
  Tensor forward(Tensor x) {
    auto h = trunk(x); // nothing here has a gradient
    return head(half(torch::tanh(trunk(before(h))))).square().mean();
  }
  P<Linear> before{width, width}, trunk{width, width}, half{width, width},
    head{width, 1};
};

template <template <class> class P>
struct teacher : torch::nn::Module {
  teacher() {
    SMP_PART(student), SMP_PART(guide), SMP_PART(drop), SMP_PART(head);
  }
  Tensor forward(Tensor x) {
    Tensor target;
    {
      torch::NoGradGuard no_grad;
      target = guide(drop(student(x)));
    }
    auto y = head(drop(student(x)));
    return (y - target).square().mean();
  }
  P<Linear> student{width, width}, guide{width, width};
  P<Dropout> drop{0.4};
  P<Linear> head{width, width};
};

// -- in place -----------------------------------------------------------------

template <template <class> class P>
struct writer : torch::nn::Module {
  writer() {
    register_parameter("weight", weight);
  }
  Tensor forward(Tensor x, std::vector<Tensor>& log) {
    x.mul_(weight);
    log.push_back(x.sum());
    return x.narrow(1, 0, 2);
  }
  Tensor weight = torch::linspace(0.8, 1.2, width);
};

template <template <class> class P>
struct in_place : torch::nn::Module {
  in_place() {
    SMP_PART(first), SMP_PART(relu), SMP_PART(write), SMP_PART(same);
  }
  Tensor forward(Tensor x) {
    auto h = first(x) * 1;
    relu(h);   // its result is dropped, h is changed
    h = h * 1; // what a ReLU put out must stay as it is
    std::vector<Tensor> log{h.sum()};
    auto part = write(h, log);
    auto view = h.narrow(1, 2, 3);
    same(view).add_(1); // what an Identity returns is its argument
    return h.square().mean() + part.sum() * log.at(1) / log.at(0);
  }
  P<Linear> first{width, width};
  P<torch::nn::ReLU> relu{torch::nn::ReLUOptions(true)};
  P<torch::nn::ModuleHolder<writer<P>>> write;
  P<torch::nn::Identity> same;
};

// -- parameters elsewhere -----------------------------------------------------

template <template <class> class P>
struct projection : torch::nn::Module {
  Tensor forward(Tensor x, Tensor weight) {
    return x.matmul(weight.t());
  }
};

/// The embedding's weight is an argument of a module on another rank, and read
/// by the model's own code.
template <template <class> class P>
struct weight_argument : torch::nn::Module {
  weight_argument() {
    SMP_PART(table), SMP_PART(body), SMP_PART(head);
  }
  Tensor forward(Tensor x) {
    auto tokens = (x.abs() * 10).to(torch::kLong) % 11;
    auto h = torch::tanh(body(table(tokens).sum(1)));
    return torch::nn::functional::cross_entropy(head(h, table->weight),
                                                tokens.select(1, 1))
           + table->weight.square().sum() * 0.01 + body->bias.abs().sum() * 0.1;
  }
  P<Embedding> table{11, width};
  P<Linear> body{width, width};
  P<torch::nn::ModuleHolder<projection<P>>> head;
};

// -- structure ----------------------------------------------------------------

template <template <class> class P>
struct inner_block : torch::nn::Module {
  inner_block() {
    SMP_PART(up), SMP_PART(drop), SMP_PART(down);
  }
  Tensor forward(Tensor x, std::optional<Tensor> skip,
                 const std::map<std::string, Tensor>& more, bool twice) {
    auto h = down(drop(torch::tanh(up(x))));
    if (skip)
      h = h + *skip;
    for (auto& [name, y] : more)
      h = h + y * static_cast<double>(name.size());
    return twice ? down(drop(torch::tanh(up(h)))) : h;
  }
  P<Linear> up{width, 2 * width};
  P<Dropout> drop{0.3};
  P<Linear> down{2 * width, width};
};

template <template <class> class P>
struct outer_block : torch::nn::Module {
  outer_block() {
    SMP_PART(left), SMP_PART(right);
  }
  std::pair<Tensor, std::variant<int64_t, Tensor>> forward(Tensor x) {
    std::map<std::string, Tensor> more;
    auto l = left(x, std::nullopt, more, false);
    more = {{"l", l}, {"xx", x}};
    auto r = right(l, x, more, true);
    return {l + r, r};
  }
  using part = torch::nn::ModuleHolder<inner_block<P>>;
  P<part> left;
  P<part> right;
};

/// Calls that go from rank to rank and back, three levels deep, with dropout,
/// two towers, and a link from the first to the last module.
template <template <class> class P>
struct nested : torch::nn::Module {
  nested() {
    SMP_PART(first), SMP_PART(a), SMP_PART(b), SMP_PART(last);
  }
  Tensor forward(Tensor x) {
    auto h = first(x);
    auto [y, extra] = a(h);
    auto [z, more] = b(torch::tanh(h));
    return last(y * std::get<Tensor>(more) + z + std::get<Tensor>(extra) + h)
      .square()
      .mean();
  }
  using part = torch::nn::ModuleHolder<outer_block<P>>;
  P<Linear> first{width, width};
  P<part> a;
  P<part> b;
  P<Linear> last{width, width};
};

// -- state (R19) --------------------------------------------------------------

/// Batch norms: in a Sequential, hidden in a block (R20), called twice, called
/// in some microbatches only.
template <template <class> class P>
struct norm_block : torch::nn::Module {
  norm_block() {
    SMP_PART(hidden), SMP_PART(fc);
  }
  Tensor forward(Tensor x) {
    return hidden(fc(x));
  }
  BatchNorm1d hidden{width};
  P<Linear> fc{width, width};
};

template <template <class> class P>
struct norms : torch::nn::Module {
  norms() {
    SMP_PART(body), SMP_PART(twice), SMP_PART(rarely), SMP_PART(block),
      SMP_PART(head);
  }
  Tensor forward(Tensor x) {
    x = body->forward(x);
    x = twice(torch::tanh(twice(x) + head(x)));
    if (x[0][0].template item<double>() > 0)
      x = rarely(x);
    return head(block(x)).square().mean();
  }
  using part = torch::nn::ModuleHolder<norm_block<P>>;
  torch::nn::Sequential body{Linear(width, width), BatchNorm1d(width),
                             torch::nn::Tanh(), Linear(width, width)};
  P<BatchNorm1d> twice{width}, rarely{width};
  P<part> block;
  P<Linear> head{width, width};
};

/// Some microbatches take a way around and come to the batch norms late: on
/// two ranks `near` is on the one where the model's code runs, `far` is not.
template <template <class> class P>
struct detour : torch::nn::Module {
  detour() {
    SMP_PART(around), SMP_PART(near), SMP_PART(far);
  }
  Tensor forward(Tensor x) {
    if (x[0][0].template item<double>() > 0)
      x = around(around(around(x)));
    return far(near(x) * 2).square().mean() + x.sum() * 0.1;
  }
  P<Linear> around{width, width};
  P<BatchNorm1d> near{width}, far{width};
};

/// The result depends on how many microbatches came before.
template <template <class> class P>
struct counter : torch::nn::Module {
  counter() {
    register_buffer("count", count);
    register_buffer("mask", torch::ones({width}));
  }
  Tensor forward(Tensor x) {
    auto y = x * (count * 0.25 + 1) * named_buffers()["mask"];
    torch::NoGradGuard no_grad;
    count.add_(1);
    return y;
  }
  Tensor count = torch::zeros({});
};

template <template <class> class P>
struct counters : torch::nn::Module {
  counters() {
    SMP_PART(a), SMP_PART(fc), SMP_PART(b), SMP_PART(head);
  }
  Tensor forward(Tensor x) {
    return head(b(torch::tanh(fc(a(x))))).square().mean();
  }
  using part = torch::nn::ModuleHolder<counter<P>>;
  P<part> a;
  P<Linear> fc{width, width};
  P<part> b;
  P<Linear> head{width, width};
};

/// The whole step body is ordered: its own code changes a buffer.
template <template <class> class P>
struct root_state : torch::nn::Module {
  root_state() {
    SMP_PART(fc), SMP_PART(head);
    register_buffer("mean", mean);
  }
  Tensor forward(Tensor x) {
    auto h = fc(x);
    {
      torch::NoGradGuard no_grad;
      mean.mul_(0.5).add_(h.mean(0));
    }
    return head(h - mean).square().mean();
  }
  P<Linear> fc{width, width}, head{width, width};
  Tensor mean = torch::zeros({width});
};

#undef SMP_PART

} // namespace smp::test
