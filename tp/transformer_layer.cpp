#include "tp/transformer_layer.hpp"

#include "tp/functions.hpp"
#include "tp/layer_norm.hpp"
#include "tp/tensor_group.hpp"
#include "tp/transformer_layer_options.hpp"
#include "transport/error.hpp"

#include <ATen/ops/cat.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/softmax.h>

#include <cmath>
#include <limits>
#include <utility>

namespace smp::nn {

namespace {

using options = transformer_layer_options;

/// Samples of all peers lie one after the other: [T B, ...].
at::Tensor samples_of(const at::Tensor& x, uint64_t peer, uint64_t peers) {
  auto n = x.size(0) / static_cast<int64_t>(peers);
  return x.narrow(0, static_cast<int64_t>(peer) * n, n);
}

/// A linear that this rank has a part of.
struct part_of_linear {
  at::Tensor weight; // [out, in], or [in, out]
  at::Tensor bias;   // undefined if another peer has it
  bool inputs_first = false;

  at::Tensor product(const at::Tensor& x) const {
    return at::linear(x, matrix());
  }

  at::Tensor apply(const at::Tensor& x) const {
    return at::linear(x, matrix(), bias);
  }

  at::Tensor matrix() const {
    return inputs_first ? weight.t() : weight;
  }
};

class layer_parts {
public:
  explicit layer_parts(const native_module& x) : x_(x) {
    // nop
  }

  part_of_linear linear(const options::linear_place& place) const {
    auto bias = optional(place.name + ".bias");
    return {x_.parameters.at(place.name + ".weight"),
            bias.defined() && bias.numel() > 0 ? bias : at::Tensor{},
            place.inputs_first};
  }

  at::Tensor optional(const std::string& name) const {
    auto i = x_.parameters.find(name);
    return i == x_.parameters.end() ? at::Tensor{} : i->second;
  }

private:
  const native_module& x_;
};

// -- what both kinds have in common -------------------------------------------

class distributed_layer : public distributed_module {
public:
  explicit distributed_layer(const native_module& x)
    : layer_(x.layer), name_(x.name) {
    layer_parts parts{x};
    for (auto& place : layer_->query_key_value)
      query_key_value_.push_back(parts.linear(place));
    attention_output_ = parts.linear(layer_->attention_output);
    intermediate_ = parts.linear(layer_->intermediate);
    output_ = parts.linear(layer_->output);
    for (auto* place : {&layer_->attention_norm, &layer_->output_norm})
      norms_.push_back({parts.optional(place->name + ".weight"),
                        parts.optional(place->name + ".bias"), place->eps});
  }

  std::vector<at::Tensor>
  forward(std::span<const at::Tensor> xs) const override {
    auto& o = *layer_;
    if (xs.empty() || xs[0].dim() != 3 || (o.takes_mask && xs.size() < 2))
      throw error{error_code::user_code,
                  "'" + name_ + "' wants hidden states [samples, tokens, "
                  "channels]" + (o.takes_mask ? " and a mask" : "")};
    auto mask = o.takes_mask ? all_masks(xs[1], xs[0].size(0)) : at::Tensor{};
    auto x = enter(xs[0]);
    auto attention = [&](const at::Tensor& h) { return attend(h, mask); };
    auto feed_forward = [&](const at::Tensor& h) { return widen(h); };
    if (o.pre_layernorm) {
      x = x + attention(norm(x, 0));
      x = x + feed_forward(norm(x, 1));
    } else {
      x = norm(x + attention(x), 0);
      x = norm(x + feed_forward(x), 1);
    }
    x = leave(x);
    return o.returns_mask ? std::vector{x, xs[1]} : std::vector{x};
  }

protected:
  struct norm_parameters {
    at::Tensor weight;
    at::Tensor bias;
    double eps;
  };

  /// Hidden states [B, tokens, C] of this peer's samples in the form in which
  /// they go through the layer, and back.
  virtual at::Tensor enter(const at::Tensor& x) const = 0;
  virtual at::Tensor leave(const at::Tensor& x) const = 0;

  /// Of hidden states.
  virtual at::Tensor norm(const at::Tensor& x, size_t which) const = 0;

  /// @param x hidden states
  /// @returns [T B, tokens, ..., out / T] of each linear, by blocks of outputs
  virtual std::vector<at::Tensor>
  split(const at::Tensor& x, const std::vector<part_of_linear>& parts,
        int64_t blocks) const = 0;

  /// @param x [T B, tokens, in / T]
  /// @returns hidden states, with dropout
  virtual at::Tensor join(const at::Tensor& x, const part_of_linear& part,
                          const options::dropout_place& dropout) const = 0;

  /// @returns its probability now
  double dropped(const options::dropout_place& x) const {
    return !layer_->training || layer_->training() ? x.p : 0;
  }

  /// @returns the paths of modules that are called one in the other, from below
  /// the layer to `name`
  std::vector<std::string> calls_of(const std::string& name) const {
    std::vector<std::string> result;
    for (size_t end = 0; end != name.npos;) {
      end = name.find('.', end + 1);
      result.push_back(name_ + "." + name.substr(0, end));
    }
    return result;
  }

  /// What dropout multiplies the samples of one peer with: [n, ...].
  at::Tensor dropout_mask(const options::dropout_place& x, uint64_t peer,
                          at::IntArrayRef sizes,
                          const at::TensorOptions& type) const {
    at::Tensor result;
    tensor_group::current().draw_as(peer, calls_of(x.name), [&] {
      result = at::dropout(at::ones(sizes, type), x.p, true);
    });
    return result;
  }

  const options& layer() const {
    return *layer_;
  }

  const norm_parameters& parameters_of_norm(size_t which) const {
    return norms_.at(which);
  }

private:
  // -- attention --------------------------------------------------------------

  at::Tensor attend(const at::Tensor& h, const at::Tensor& mask) const {
    auto& o = *layer_;
    auto peers = static_cast<int64_t>(tensor_group::current().size());
    auto heads = o.num_attention_heads / peers;
    auto fused = query_key_value_.size() == 1;
    std::vector<at::Tensor> qkv;
    for (auto& x : split(h, query_key_value_, fused ? 3 : 1))
      for (auto& y : fused ? x.unbind(2) : std::vector{x})
        qkv.push_back(y.unflatten(2, {heads, -1}).transpose(1, 2));
    auto y = weighted(qkv[0], qkv[1], qkv[2], mask);
    return join(y.transpose(1, 2).flatten(2), attention_output_,
                o.attention_output_dropout);
  }

  /// q, k, v: [T B, heads / T, tokens, d] @returns as they
  at::Tensor weighted(const at::Tensor& q, const at::Tensor& k,
                      const at::Tensor& v, const at::Tensor& given) const {
    auto& o = *layer_;
    auto mask = given;
    auto tokens = q.size(2);
    auto banded = o.window > 0 && o.window < tokens;
    if (banded)
      mask = at::ones({tokens, tokens}, q.options().dtype(at::kBool))
               .tril()
               .triu(1 - o.window);
    auto p = dropped(o.attention_dropout);
    if (p == 0)
      return at::scaled_dot_product_attention(
        q, k, v, mask.defined() ? std::optional{mask} : std::nullopt, 0,
        o.causal && !banded, o.scale);
    if (o.causal && !banded)
      mask = at::ones({tokens, tokens}, q.options().dtype(at::kBool)).tril();
    auto scale = o.scale.value_or(1
                                  / std::sqrt(static_cast<double>(q.size(3))));
    auto scores = at::matmul(q * scale, k.transpose(2, 3));
    if (mask.defined() && mask.scalar_type() == at::kBool)
      scores = scores.masked_fill(mask.logical_not(),
                                  -std::numeric_limits<double>::infinity());
    else if (mask.defined())
      scores = scores + mask;
    auto weights = at::softmax(scores, -1);
    return at::matmul(weights * dropped_weights(weights), v);
  }

  /// A rank draws for the heads of all, and takes those of its own.
  at::Tensor dropped_weights(const at::Tensor& like) const {
    auto& group = tensor_group::current();
    auto heads = like.size(1);
    std::vector<at::Tensor> parts;
    for (uint64_t i = 0; i < group.size(); ++i) {
      auto sizes = samples_of(like, i, group.size()).sizes().vec();
      sizes[1] = layer_->num_attention_heads;
      auto all = dropout_mask(layer_->attention_dropout, i, sizes,
                              like.options());
      parts.push_back(
        all.narrow(1, static_cast<int64_t>(group.rank()) * heads, heads));
    }
    return at::cat(parts, 0);
  }

  /// Those of the samples of all peers: [T B, heads or 1, ...].
  at::Tensor all_masks(at::Tensor x, int64_t samples) const {
    auto& group = tensor_group::current();
    if (x.requires_grad())
      throw error{error_code::unsupported,
                  "the mask of '" + name_ + "' requires grad, which ranks that "
                  "share the layer do not send back: detach it, or name its "
                  "linears in tensor_parallel.modules instead of it"};
    while (x.dim() < 4)
      x = x.unsqueeze(0);
    // What is the same for all samples travels once.
    auto one = x.size(0) == 1 || x.stride(0) == 0;
    auto all = fused_allgather_for_tp(one ? x.narrow(0, 0, 1) : x, 0);
    if (one)
      all = all.repeat_interleave(samples, 0);
    if (all.size(1) == 1)
      return all;
    auto heads = all.size(1) / static_cast<int64_t>(group.size());
    return all.narrow(1, static_cast<int64_t>(group.rank()) * heads, heads);
  }

  // -- feed-forward -----------------------------------------------------------

  at::Tensor widen(const at::Tensor& h) const {
    auto inner = split(h, {intermediate_}, 1).front();
    return join(layer_->activation(inner), output_, layer_->output_dropout);
  }

  std::shared_ptr<const options> layer_;
  std::string name_;
  std::vector<part_of_linear> query_key_value_;
  part_of_linear attention_output_;
  part_of_linear intermediate_;
  part_of_linear output_;
  std::vector<norm_parameters> norms_;
};

// -- for speed ----------------------------------------------------------------

/// Hidden states: [B, tokens, C], the samples of this peer.
class fast_layer final : public distributed_layer {
public:
  using distributed_layer::distributed_layer;

protected:
  at::Tensor enter(const at::Tensor& x) const override {
    return x;
  }

  at::Tensor leave(const at::Tensor& x) const override {
    return x;
  }

  at::Tensor norm(const at::Tensor& x, size_t which) const override {
    auto& p = parameters_of_norm(which);
    return at::layer_norm(x, {x.size(-1)}, p.weight, p.bias, p.eps);
  }

  std::vector<at::Tensor> split(const at::Tensor& x,
                                const std::vector<part_of_linear>& parts,
                                int64_t blocks) const override {
    auto all = fused_allgather_for_tp(x, 0);
    std::vector<at::Tensor> result;
    for (auto& part : parts) {
      auto y = part.apply(all);
      result.push_back(blocks == 1 ? y : y.unflatten(2, {blocks, -1}));
    }
    return result;
  }

  at::Tensor join(const at::Tensor& x, const part_of_linear& part,
                  const options::dropout_place& dropout) const override {
    auto y = reduce_scatter_for_tp(part.product(x), 0);
    if (part.bias.defined())
      y = y + part.bias;
    if (dropped(dropout) == 0)
      return y;
    auto& group = tensor_group::current();
    return y * dropout_mask(dropout, group.rank(), y.sizes(), y.options());
  }
};

// -- for memory ---------------------------------------------------------------

/// Hidden states: [T B, tokens, C / T], a part of the channels of all samples.
class small_layer final : public distributed_layer {
public:
  using distributed_layer::distributed_layer;

protected:
  at::Tensor enter(const at::Tensor& x) const override {
    return scatter_and_merge_for_tp(x, -1, 0);
  }

  at::Tensor leave(const at::Tensor& x) const override {
    return scatter_and_merge_for_tp(x, 0, -1);
  }

  at::Tensor norm(const at::Tensor& x, size_t which) const override {
    auto& p = parameters_of_norm(which);
    return layer_norm_for_tp(x, 1, p.weight, p.bias, p.eps);
  }

  std::vector<at::Tensor> split(const at::Tensor& x,
                                const std::vector<part_of_linear>& parts,
                                int64_t blocks) const override {
    std::vector<at::Tensor> result;
    for (auto& part : parts) {
      auto y = part.apply(x);
      result.push_back(reduce_scatter_for_tp(
        blocks == 1 ? y : y.unflatten(2, {blocks, -1}), -1));
    }
    return result;
  }

  at::Tensor join(const at::Tensor& x, const part_of_linear& part,
                  const options::dropout_place& dropout) const override {
    auto y = reduce_scatter_for_tp(part.apply(x), -1);
    if (dropped(dropout) == 0)
      return y;
    auto& group = tensor_group::current();
    auto channels = y.size(-1);
    std::vector<at::Tensor> parts;
    for (uint64_t i = 0; i < group.size(); ++i) {
      auto sizes = samples_of(y, i, group.size()).sizes().vec();
      sizes.back() = channels * static_cast<int64_t>(group.size());
      parts.push_back(
        dropout_mask(dropout, i, sizes, y.options())
          .narrow(-1, static_cast<int64_t>(group.rank()) * channels, channels));
    }
    return y * at::cat(parts, 0);
  }
};

// -- slices -------------------------------------------------------------------

/// Cuts the parameters of a layer for one peer.
class cutter {
public:
  cutter(const native_module& x, int64_t rank, int64_t peers)
    : x_(x), rank_(rank), peers_(peers) {
    // nop
  }

  parameter_slices run() {
    auto& o = *x_.layer;
    auto blocks = o.query_key_value.size() == 1 ? 3 : 1;
    for (auto& place : o.query_key_value)
      first(place, blocks);
    first(o.intermediate, 1);
    second(o.attention_output);
    second(o.output);
    if (x_.saves_memory)
      for (auto* norm : {&o.attention_norm, &o.output_norm})
        for (auto* what : {".weight", ".bias"})
          cut(norm->name + what, 0, 1);
    return std::move(result_);
  }

private:
  void first(const transformer_layer_options::linear_place& place,
             int64_t blocks) {
    if (x_.saves_memory)
      return second(place);
    cut(place.name + ".weight", place.inputs_first ? 1 : 0, blocks);
    cut(place.name + ".bias", 0, blocks);
  }

  void second(const transformer_layer_options::linear_place& place) {
    cut(place.name + ".weight", place.inputs_first ? 0 : 1, 1);
    if (x_.saves_memory)
      whole_on_first(place.name + ".bias");
  }

  void cut(const std::string& name, int64_t dim, int64_t blocks) {
    auto i = x_.parameters.find(name);
    if (i == x_.parameters.end())
      return;
    auto length = i->second.size(dim) / blocks / peers_;
    result_[name] = {dim, rank_ * length, length, i->second.sizes().vec(),
                     blocks};
  }

  /// It is added before results are summed.
  void whole_on_first(const std::string& name) {
    auto i = x_.parameters.find(name);
    if (i == x_.parameters.end())
      return;
    auto n = i->second.size(0);
    result_[name] = {0, rank_ == 0 ? 0 : n, rank_ == 0 ? n : 0,
                     i->second.sizes().vec()};
  }

  const native_module& x_;
  int64_t rank_;
  int64_t peers_;
  parameter_slices result_;
};

std::string not_divided(int64_t n, const char* what, int64_t peers) {
  return n % peers == 0
           ? std::string{}
           : "its " + std::to_string(n) + " " + what
               + " cannot be divided among " + std::to_string(peers)
               + " ranks (its linears may be)";
}

std::string refusal_of_layer(const native_module& x, int64_t peers) {
  auto& o = *x.layer;
  for (auto& name : {o.intermediate.name, o.output.name,
                     o.attention_output.name, o.query_key_value.front().name})
    if (!x.parameters.contains(name + ".weight"))
      return "it has no parameter '" + name + ".weight'";
  if (auto why = not_divided(o.num_attention_heads, "heads", peers);
      !why.empty())
    return why;
  auto channels = [&](const options::linear_place& place, bool in) {
    return x.parameters.at(place.name + ".weight")
      .size(place.inputs_first == in ? 0 : 1);
  };
  auto why = not_divided(channels(o.output, true), "inner channels", peers);
  if (why.empty() && x.saves_memory)
    why = not_divided(channels(o.intermediate, true), "channels", peers);
  return why;
}

parameter_slices slices_of_layer(const native_module& x, int64_t rank,
                                 int64_t peers) {
  return cutter{x, rank, peers}.run();
}

std::unique_ptr<distributed_module> make_layer(const native_module& x,
                                               const parameter_slices&) {
  if (x.saves_memory)
    return std::make_unique<small_layer>(x);
  return std::make_unique<fast_layer>(x);
}

const char* manner_of_layer(const native_module& x, int64_t) {
  return x.saves_memory ? "for memory" : "for speed";
}

} // namespace

const distribution transformer_layer_distribution{.type = "TransformerLayer",
                                                  .refusal = refusal_of_layer,
                                                  .slices = slices_of_layer,
                                                  .make = make_layer,
                                                  .manner = manner_of_layer};

} // namespace smp::nn
