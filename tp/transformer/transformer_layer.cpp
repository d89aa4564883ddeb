#include "tp/transformer/transformer_layer.hpp"

#include "tp/entered_tensors.hpp"
#include "tp/functions.hpp"
#include "tp/layer_norm.hpp"
#include "tp/linears.hpp"
#include "tp/tensor_group.hpp"
#include "tp/transformer/attention_mask.hpp"
#include "tp/transformer/transformer_cut.hpp"
#include "tp/transformer/transformer_layer_options.hpp"
#include "transport/error.hpp"

#include <ATen/TensorOperators.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/softmax.h>

#include <cmath>
#include <optional>
#include <string_view>
#include <utility>

namespace smp::nn {

namespace {

using options = transformer_layer_options;

/// Samples of all peers follow each other: [T B, ...]. (Here and below T is 1
/// where all peers have the same samples.)
at::Tensor samples_of(const at::Tensor& x, uint64_t peer, uint64_t peers) {
  auto n = x.size(0) / static_cast<int64_t>(peers);
  return x.narrow(0, static_cast<int64_t>(peer) * n, n);
}

/// @returns this T
uint64_t batches_of_all() {
  auto& group = tensor_group::current();
  return group.same_samples() ? 1 : group.size();
}

/// A linear of which this rank holds a part.
struct part_of_linear {
  at::Tensor weight; // [out, in], or [in, out]
  at::Tensor bias;   // undefined: none; empty: another peer adds it
  bool inputs_first = false;

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
    return {x_.parameters.at(place.name + ".weight"),
            optional(place.name + ".bias"), place.inputs_first};
  }

  std::vector<part_of_linear>
  linears(const std::vector<options::linear_place>& places) const {
    std::vector<part_of_linear> result;
    for (auto& place : places)
      result.push_back(linear(place));
    return result;
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
    auto& o = *layer_;
    layer_parts parts{x};
    if (o.has_attention())
      self_ = attention{
        parts.linears(o.query_key_value),
        parts.linear(o.attention_output),
        o.attention_dropout,
        o.attention_output_dropout,
        norms_of(parts, o, o.attention_norm, o.attention_post_norm),
        true};
    if (auto& cross = o.cross_attention)
      cross_ = attention{
        parts.linears({cross->query, cross->key, cross->value}),
        parts.linear(cross->output),
        cross->dropout,
        cross->output_dropout,
        norms_of(parts, o, cross->norm, cross->post_norm),
        false};
    if (o.has_output()) {
      widening_.push_back(parts.linear(o.intermediate));
      if (!o.gate.name.empty())
        widening_.push_back(parts.linear(o.gate));
      output_ = parts.linear(o.output);
      output_norms_ = norms_of(parts, o, o.output_norm, o.output_post_norm);
    }
    if (o.positions)
      positions_ = x.parameters.at(o.positions->name + ".weight");
  }

  std::vector<at::Tensor>
  forward(std::span<const at::Tensor> xs) const override {
    return forward_in_row(xs, {});
  }

  std::vector<at::Tensor>
  forward_in_row(std::span<const at::Tensor> xs,
                 const row_place& place) const override {
    check(xs);
    auto& o = *layer_;
    auto samples = xs[0].size(0);
    if (!place.first)
      samples /= static_cast<int64_t>(batches_of_all());
    auto mask = o.takes_mask ? optional(xs, o.mask_position) : at::Tensor{};
    auto masked = mask.defined();
    if (positions_.defined())
      mask = mask
             + gather_slices_for_tp(
               o.positions->bias(positions_, xs[0].size(1)), 1);
    auto seen = masked ? all_masks(mask, samples) : at::Tensor{};
    auto x = place.first ? enter(xs[0]) : xs[0];
    if (self_)
      x = part(x, self_->norms,
               [&](const auto& h) { return attend(*self_, h, h, seen); });
    if (cross_) {
      auto context = enter_context(xs[o.context_position]);
      auto given = optional(xs, o.context_mask_position);
      auto shown = given.defined() ? all_masks(given, samples) : given;
      x = part(x, cross_->norms, [&](const auto& h) {
        return attend(*cross_, h, context, shown);
      });
    }
    if (o.has_output())
      x = part(x, output_norms_, [&](const auto& h) { return widen(h); });
    if (place.last)
      x = leave(x);
    if (!o.returns_arguments)
      return {x};
    std::vector<at::Tensor> result{xs.begin(), xs.end()};
    result[0] = x;
    if (masked)
      result[o.mask_position] = mask;
    return result;
  }

protected:
  struct norm_parameters {
    at::Tensor weight;
    at::Tensor bias;
    double eps;
  };

  /// Convert hidden states [B, tokens, C] of this peer's samples to the form
  /// that they have inside the layer, and back.
  virtual at::Tensor enter(const at::Tensor& x) const = 0;
  virtual at::Tensor leave(const at::Tensor& x) const = 0;

  /// [B, any, C] of this peer's samples in the form in which they are attended
  /// to, computed once for all consecutive layers.
  virtual at::Tensor enter_context(const at::Tensor& x) const = 0;

  /// Normalises hidden states.
  virtual at::Tensor norm(const at::Tensor& x,
                          const norm_parameters& p) const = 0;

  /// @param x hidden states
  /// @returns [T B, tokens, ..., out / T] of each linear, by blocks of outputs
  virtual std::vector<at::Tensor> split(const at::Tensor& x,
                                        std::span<const part_of_linear> parts,
                                        int64_t blocks) const = 0;

  /// The same for a context.
  virtual std::vector<at::Tensor>
  split_context(const at::Tensor& x,
                std::span<const part_of_linear> parts) const = 0;

  /// @param x [T B, tokens, in / T]
  /// @returns hidden states, with dropout
  virtual at::Tensor join(const at::Tensor& x, const part_of_linear& part,
                          const options::dropout_place& dropout) const = 0;

  static std::pair<std::vector<at::Tensor>, std::vector<at::Tensor>>
  parameters_of(std::span<const part_of_linear> parts) {
    std::pair<std::vector<at::Tensor>, std::vector<at::Tensor>> result;
    for (auto& part : parts) {
      result.first.push_back(part.matrix());
      result.second.push_back(part.bias);
    }
    return result;
  }

  static std::vector<at::Tensor> in_blocks(std::vector<at::Tensor> xs,
                                           int64_t blocks) {
    if (blocks > 1)
      for (auto& x : xs)
        x = x.unflatten(2, {blocks, -1});
    return xs;
  }

  /// @returns its current probability
  double dropped(const options::dropout_place& x) const {
    return !layer_->training || layer_->training() ? x.p : 0;
  }

  /// @returns the paths of modules that call each other, from below the layer
  /// to `name`; none if that is the layer
  std::vector<std::string> calls_of(const std::string& name) const {
    std::vector<std::string> result;
    for (size_t end = name.empty() ? name.npos : 0; end != name.npos;) {
      end = name.find('.', end + 1);
      if (auto path = name.substr(0, end); !layer_->containers.contains(path))
        result.push_back(name_ + "." + path);
    }
    return result;
  }

  /// The factors of dropout for the samples of one peer: [n, ...].
  at::Tensor dropout_mask(const options::dropout_place& x, uint64_t peer,
                          at::IntArrayRef sizes,
                          const at::TensorOptions& type) const {
    at::Tensor result;
    tensor_group::current().draw_as(peer, calls_of(x.name), [&] {
      result = at::dropout(at::ones(sizes, type), x.p, true);
    });
    return result;
  }

  /// The same for all samples if each rank holds a range of `axis`: it draws
  /// all numbers, and takes its own. No more than one peer's exist at a time,
  /// because those of attention are many.
  at::Tensor dropout_mask_of_part(const options::dropout_place& x,
                                  const at::Tensor& like, int64_t axis) const {
    auto& group = tensor_group::current();
    auto mine = like.size(axis);
    auto result = at::empty(like.sizes(), like.options());
    const auto batches = batches_of_all();
    for (uint64_t i = 0; i < batches; ++i) {
      auto part = samples_of(result, i, batches);
      auto sizes = part.sizes().vec();
      sizes[static_cast<size_t>(axis)] *= static_cast<int64_t>(group.size());
      part.copy_(
        dropout_mask(x, i, sizes, like.options())
          .narrow(axis, static_cast<int64_t>(group.rank()) * mine, mine));
    }
    return result;
  }

  const options& layer() const {
    return *layer_;
  }

private:
  /// The norms that exist.
  struct norms_of_part {
    std::optional<norm_parameters> before, behind;
  };

  struct attention {
    std::vector<part_of_linear> inputs; // query, key, value; or one for all
    part_of_linear output;
    options::dropout_place dropout;
    options::dropout_place output_dropout;
    norms_of_part norms;
    bool of_itself = true;
  };

  static norm_parameters norm_of(const layer_parts& parts,
                                 const options::norm_place& place) {
    return {parts.optional(place.name + ".weight"),
            parts.optional(place.name + ".bias"), place.eps};
  }

  /// @param first the only norm, or the one before
  /// @param second the one behind, if there are both
  static norms_of_part norms_of(const layer_parts& parts, const options& o,
                                const options::norm_place& first,
                                const options::norm_place& second) {
    norms_of_part result;
    if (o.pre_layernorm)
      result.before = norm_of(parts, first);
    if (o.post_layernorm)
      result.behind = norm_of(parts, o.pre_layernorm ? second : first);
    return result;
  }

  /// @returns an undefined tensor if there is none
  static at::Tensor optional(std::span<const at::Tensor> xs, size_t position) {
    return position < xs.size() ? xs[position] : at::Tensor{};
  }

  void check(std::span<const at::Tensor> xs) const {
    auto& o = *layer_;
    auto has = [&](size_t position) {
      return optional(xs, position).defined();
    };
    if (has(0) && xs[0].dim() == 3 && (!o.positions || has(o.mask_position))
        && (!o.cross_attention
            || (has(o.context_position) && xs[o.context_position].dim() == 3)))
      return check_causal_mask_size(xs[0].size(1), o.causal_mask_size);
    throw error{error_code::user_code,
                "'" + name_
                  + "' expects hidden states [samples, tokens, channels]"
                  + (o.takes_mask ? " and a mask" : "")
                  + (o.cross_attention
                       ? ", and what it attends to, [samples, any, channels]"
                       : "")};
  }

  template <class F>
  at::Tensor part(const at::Tensor& x, const norms_of_part& norms, F f) const {
    auto y = x + f(norms.before ? norm(x, *norms.before) : x);
    return norms.behind ? norm(y, *norms.behind) : y;
  }

  // -- attention --------------------------------------------------------------

  /// @param x hidden states that give the queries
  /// @param context those that give keys and values
  at::Tensor attend(const attention& parts, const at::Tensor& x,
                    const at::Tensor& context, const at::Tensor& mask) const {
    auto peers = static_cast<int64_t>(tensor_group::current().size());
    auto heads = layer_->num_attention_heads / peers;
    std::span<const part_of_linear> inputs{parts.inputs};
    std::vector<at::Tensor> qkv;
    if (inputs.size() == 1)
      qkv = split(x, inputs, 3).front().unbind(2);
    else if (context.is_same(x))
      qkv = split(x, inputs, 1);
    else {
      qkv = split(x, inputs.first(1), 1);
      for (auto& y : split_context(context, inputs.subspan(1)))
        qkv.push_back(y);
    }
    for (auto& y : qkv)
      y = y.unflatten(2, {heads, -1}).transpose(1, 2);
    auto y = weighted(parts, qkv, mask);
    return join(y.transpose(1, 2).flatten(2), parts.output,
                parts.output_dropout);
  }

  /// qkv: [T B, heads / T, tokens, d] each @returns the same shape
  at::Tensor weighted(const attention& parts,
                      const std::vector<at::Tensor>& qkv,
                      const at::Tensor& given) const {
    auto& o = *layer_;
    auto &q = qkv[0], &k = qkv[1], &v = qkv[2];
    auto mask = given;
    auto tokens = q.size(2);
    auto causal = o.causal && parts.of_itself;
    auto p = dropped(parts.dropout);
    auto learns = mask.defined() && mask.requires_grad();
    auto banded = parts.of_itself && o.window > 0 && o.window < tokens;
    if (banded || (causal && (mask.defined() || p > 0))) {
      auto band = causal_mask(tokens, q.device());
      mask = both_masks(banded ? band.triu(1 - o.window) : band, mask);
      causal = false;
    }
    if (p == 0 && !learns)
      return at::scaled_dot_product_attention(
        q, k, v, mask.defined() ? std::optional{mask} : std::nullopt, 0, causal,
        o.scale);
    auto scale = o.scale.value_or(1
                                  / std::sqrt(static_cast<double>(q.size(3))));
    auto scores = at::matmul(q * scale, k.transpose(2, 3));
    auto weights = at::softmax(masked(scores, mask), -1);
    if (p > 0)
      weights = weights * dropout_mask_of_part(parts.dropout, weights, 1);
    return at::matmul(weights, v);
  }

  /// The masks of the samples of all peers: [T B, heads / T or 1, ...].
  static at::Tensor all_masks(const at::Tensor& x, int64_t samples) {
    return enter_once(x, entered_tensors::form::mask, samples,
                      [&] { return gathered_masks(x, samples); });
  }

  static at::Tensor gathered_masks(at::Tensor x, int64_t samples) {
    while (x.dim() < 4)
      x = x.unsqueeze(0);
    // A mask that is the same for all samples travels once.
    auto one = x.size(0) == 1 || x.stride(0) == 0;
    if (one)
      x = x.narrow(0, 0, 1);
    auto all = x.size(1) == 1 ? gather_batch_for_tp(x)
                              : split_batch_for_tp(x, 1);
    return one ? all.repeat_interleave(samples, 0) : all;
  }

  // -- feed-forward -----------------------------------------------------------

  at::Tensor widen(const at::Tensor& h) const {
    auto xs = split(h, widening_, 1);
    auto inner = layer_->activation(xs.front());
    if (xs.size() > 1)
      inner = inner * xs[1];
    if (dropped(layer_->inner_dropout) > 0)
      inner = inner * dropout_mask_of_part(layer_->inner_dropout, inner, 2);
    return join(inner, output_, layer_->output_dropout);
  }

  std::shared_ptr<const options> layer_;
  std::string name_;
  std::optional<attention> self_, cross_;
  std::vector<part_of_linear> widening_;
  part_of_linear output_;
  norms_of_part output_norms_;
  at::Tensor positions_;
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

  at::Tensor enter_context(const at::Tensor& x) const override {
    return enter_once(x, entered_tensors::form::whole, x.size(0),
                      [&] { return gather_batch_for_tp(x); });
  }

  at::Tensor norm(const at::Tensor& x,
                  const norm_parameters& p) const override {
    if (!layer().rms_norm) {
      // With parameters in half precision, TorchScript's own autocast, unlike
      // that of eager code, makes hidden states float32.
      auto fitting = [&](const at::Tensor& parameter) {
        return parameter.defined() && x.scalar_type() == at::kFloat
                 ? parameter.to(at::kFloat)
                 : parameter;
      };
      return at::layer_norm(x, {x.size(-1)}, fitting(p.weight), fitting(p.bias),
                            p.eps);
    }
    auto y = x.scalar_type() == at::kDouble ? x : x.to(at::kFloat);
    auto scaled = x * at::rsqrt(y.square().mean(-1, true) + p.eps);
    return p.weight * scaled.to(p.weight.scalar_type());
  }

  std::vector<at::Tensor> split(const at::Tensor& x,
                                std::span<const part_of_linear> parts,
                                int64_t blocks) const override {
    auto [weights, biases] = parameters_of(parts);
    return in_blocks(linears_for_tp(x, entry::gather, weights, biases), blocks);
  }

  std::vector<at::Tensor>
  split_context(const at::Tensor& x,
                std::span<const part_of_linear> parts) const override {
    auto [weights, biases] = parameters_of(parts);
    return linears_for_tp(x, entry::done, weights, biases);
  }

  at::Tensor join(const at::Tensor& x, const part_of_linear& part,
                  const options::dropout_place& dropout) const override {
    auto y = scattered_linear_for_tp(x, entry::done, part.matrix(), {});
    if (part.bias.defined()) // of another type with autocast
      y = (y + part.bias).to(y.scalar_type());
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

  bool stands_in_rows() const noexcept override {
    return true;
  }

protected:
  at::Tensor enter(const at::Tensor& x) const override {
    return split_batch_for_tp(x, -1);
  }

  at::Tensor leave(const at::Tensor& x) const override {
    return merge_batch_for_tp(x, -1);
  }

  at::Tensor enter_context(const at::Tensor& x) const override {
    return enter_once(x, entered_tensors::form::part, x.size(0),
                      [&] { return enter(x); });
  }

  at::Tensor norm(const at::Tensor& x,
                  const norm_parameters& p) const override {
    return layer().rms_norm ? rms_norm_for_tp(x, p.weight, p.eps)
                            : layer_norm_for_tp(x, 1, p.weight, p.bias, p.eps);
  }

  std::vector<at::Tensor> split(const at::Tensor& x,
                                std::span<const part_of_linear> parts,
                                int64_t blocks) const override {
    return in_blocks(reduced(x, parts, blocks), blocks);
  }

  std::vector<at::Tensor>
  split_context(const at::Tensor& x,
                std::span<const part_of_linear> parts) const override {
    return reduced(x, parts, 1);
  }

  at::Tensor join(const at::Tensor& x, const part_of_linear& part,
                  const options::dropout_place& dropout) const override {
    auto y = reduced(x, {&part, 1}, 1).front();
    return dropped(dropout) == 0 ? y : y * dropout_mask_of_part(dropout, y, 2);
  }

private:
  static std::vector<at::Tensor> reduced(const at::Tensor& x,
                                         std::span<const part_of_linear> parts,
                                         int64_t blocks) {
    auto [weights, biases] = parameters_of(parts);
    return reduced_linears_for_tp(x, weights, biases, blocks);
  }
};

// -- how it is made -----------------------------------------------------------

std::unique_ptr<distributed_module> make_layer(const native_module& x,
                                               const parameter_slices&) {
  if (x.saves_memory)
    return std::make_unique<small_layer>(x);
  return std::make_unique<fast_layer>(x);
}

const char* manner_of_layer(const native_module& x, int64_t) {
  return x.saves_memory ? "for memory" : "for speed";
}

constexpr distribution layer_as(std::string_view type) {
  return {.type = type,
          .refusal = refusal_of_layer,
          .slices = slices_of_layer,
          .make = make_layer,
          .manner = manner_of_layer,
          .of_layer = true};
}

} // namespace

constinit const distribution transformer_layer_distribution = layer_as(
  "TransformerLayer");
constinit const distribution attention_layer_distribution = layer_as(
  "AttentionLayer");
constinit const distribution transformer_output_layer_distribution = layer_as(
  "TransformerOutputLayer");

} // namespace smp::nn
