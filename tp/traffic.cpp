#include "tp/traffic.hpp"

#include "tp/transformer/transformer_layer_options.hpp"

#include <algorithm>
#include <functional>
#include <numeric>
#include <string>

namespace smp::nn {

namespace {

/// Counts the numbers that one rank sends.
class counter {
public:
  counter(const native_module& x, const traced_calls& how)
    : x_(x),
      how_(how),
      peers_(static_cast<double>(how.peers)),
      bytes_(static_cast<double>(how.bytes)),
      element_(x.parameters.empty()
                 ? sizeof(float)
                 : x.parameters.begin()->second.element_size()) {
    // nop
  }

  std::optional<double> run() const {
    if (x_.type == "LMHead")
      return head();
    // What such a class does around this module is not known.
    if (!x_.own_names.empty())
      return std::nullopt;
    if (x_.type == "Linear")
      return linear(1);
    if (x_.type == "Conv1D")
      return linear(0);
    if (x_.type == "Embedding")
      return embedding();
    if (x_.type == "LayerNorm")
      return layer_norm();
    if (x_.layer)
      return layer();
    return std::nullopt;
  }

private:
  // -- modules ----------------------------------------------------------------

  double linear(int64_t inputs) const {
    auto in = size_of("weight", inputs);
    auto out = size_of("weight", 1 - inputs);
    auto rows = bytes_ / element_ / (in + out);
    return element_ * (split(rows * in) + scatter(rows * out));
  }

  double embedding() const {
    auto channels = size_of("weight", 1);
    auto rows = bytes_ / (index_ + element_ * channels);
    auto by_rows = x_.how->manner(x_, how_.peers) != nullptr;
    return indices(rows)
           + element_
               * (by_rows ? scatter(rows * channels) : merge(rows * channels));
  }

  double layer_norm() const {
    double channels = 1;
    for (auto n : x_.normalized_shape)
      channels *= static_cast<double>(n);
    auto n = bytes_ / element_ / 2;
    return element_ * (split(n) + merge(n)) + moments(n / channels);
  }

  double head() const {
    auto words = size_of("weight", 0);
    auto channels = size_of("weight", 1);
    // The result is a loss, with labels as an argument, or logits whose loss
    // other code wants.
    auto with_logits = static_cast<uint64_t>(element_ * (channels + words));
    auto rows = how_.bytes % with_logits == 0
                  ? bytes_ / (element_ * (channels + words))
                  : (bytes_ - element_ * static_cast<double>(how_.calls))
                      / (element_ * channels + index_);
    auto of_all = how_.same_samples ? rows : peers_ * rows;
    auto losses = how_.same_samples ? 0 : allgather(rows);
    return element_ * gather(rows * channels) + indices(rows)
           + computed() * (allgather(3 * of_all) + losses);
  }

  std::optional<double> layer() const {
    if (how_.arguments.empty())
      return std::nullopt;
    double result = 0;
    for (auto& call : how_.arguments)
      if (auto bytes = layer(call))
        result += *bytes;
      else
        return std::nullopt;
    return result;
  }

  using arguments = std::vector<traced_argument>;

  std::optional<double> layer(const arguments& xs) const {
    auto& o = *x_.layer;
    auto channels = channels_of_layer();
    auto fits = [&](size_t i) {
      return i < xs.size() && xs[i].sizes.size() == 3
             && static_cast<double>(xs[i].sizes[2]) == channels;
    };
    if (!fits(0) || (o.cross_attention && !fits(o.context_position))
        || (o.positions && o.mask_position >= xs.size()))
      return std::nullopt;
    auto states = numbers_in(xs[0]);
    auto context = o.cross_attention ? numbers_in(xs[o.context_position]) : 0;
    auto parts = o.has_attention() + o.cross_attention.has_value()
                 + o.has_output();
    auto masks = bytes_of_masks(xs);
    if (!x_.saves_memory)
      return masks
             + element_
                 * (parts * (gather(states) + scatter(states))
                    + gather(context));
    auto rows = states / channels;
    auto norms = parts * (o.pre_layernorm + o.post_layernorm);
    return masks
           + element_
               * (split(states) + merge(states) + split(context)
                  + over_channels(outputs_of_layer(rows, context / channels)))
           + norms * (o.rms_norm ? squares(rows) : moments(rows));
  }

  double channels_of_layer() const {
    auto& o = *x_.layer;
    if (o.has_output())
      return inputs_of(o.intermediate);
    return outputs_of(o.has_attention() ? o.attention_output
                                        : o.cross_attention->output);
  }

  /// Numbers that all linears produce for so many rows of hidden states, and of
  /// the context that these attend to.
  double outputs_of_layer(double rows, double context_rows) const {
    auto& o = *x_.layer;
    double result = 0;
    if (o.has_attention())
      result += rows
                * (3 * inputs_of(o.attention_output)
                   + outputs_of(o.attention_output));
    if (auto& cross = o.cross_attention)
      result += (rows + 2 * context_rows) * inputs_of(cross->output)
                + rows * outputs_of(cross->output);
    if (o.has_output())
      result += rows
                * ((o.gate.name.empty() ? 1 : 2) * inputs_of(o.output)
                   + outputs_of(o.output));
    return result;
  }

  double bytes_of_masks(const arguments& xs) const {
    auto& o = *x_.layer;
    double result = 0;
    if (o.takes_mask && o.mask_position < xs.size()) {
      auto mask = by_heads(xs[o.mask_position]);
      if (o.positions)
        result += add_positions(mask, xs[0].sizes[1]);
      result += bytes_of_mask(mask);
    }
    if (o.cross_attention && o.context_mask_position < xs.size())
      result += bytes_of_mask(by_heads(xs[o.context_mask_position]));
    return result;
  }

  static traced_argument by_heads(traced_argument x) {
    while (x.sizes.size() < 4)
      x.sizes.insert(x.sizes.begin(), 1);
    return x;
  }

  /// @param mask becomes the sum of both
  /// @returns bytes to gather the heads of all peers for own samples
  double add_positions(traced_argument& mask, int64_t tokens) const {
    auto& table = x_.parameters.at(x_.layer->positions->name + ".weight");
    auto heads = x_.layer->num_attention_heads;
    auto bytes = static_cast<double>(table.element_size());
    auto mine = static_cast<double>(heads * tokens * tokens) / peers_;
    mask.sizes = {mask.sizes[0], heads, tokens, tokens};
    mask.element_bytes = std::max<uint64_t>(mask.element_bytes,
                                            table.element_size());
    mask.repeats = false;
    mask.has_gradient = true;
    return bytes
           * (allgather(mine) + (how_.same_samples ? 0 : reduce_scatter(mine)));
  }

  /// A mask that is the same for all samples travels once; of a mask per head,
  /// each rank takes the heads that it holds.
  double bytes_of_mask(const traced_argument& x) const {
    auto n = numbers_in(x);
    if (x.repeats)
      n /= static_cast<double>(x.sizes[0]);
    auto all_heads = x.sizes[1] == 1;
    auto there = how_.same_samples ? 0
                 : all_heads       ? allgather(n)
                                   : all_to_all(n);
    auto back = !x.has_gradient ? 0
                : all_heads     ? gather(n) - there
                                : split(n) - there;
    return static_cast<double>(x.element_bytes) * (there + back);
  }

  static double numbers_in(const traced_argument& x) {
    return std::accumulate(x.sizes.begin(), x.sizes.end(), 1.0,
                           std::multiplies<>{});
  }

  // -- what they are made of, forward and backward ----------------------------

  /// n: numbers of this rank's samples, before or after. See functions.cpp.
  double gather(double n) const {
    return how_.same_samples ? allreduce(n) : allgather(n) + reduce_scatter(n);
  }

  double scatter(double n) const {
    return gather(n);
  }

  double split(double n) const {
    return how_.same_samples ? allgather(n / peers_) : 2 * all_to_all(n);
  }

  double merge(double n) const {
    return split(n);
  }

  /// n: numbers of this rank's samples in all channels, after.
  double over_channels(double n) const {
    auto mine = how_.same_samples ? n / peers_ : n;
    return reduce_scatter(mine) + allgather(mine);
  }

  /// Bytes. Indices have no gradient.
  double indices(double n) const {
    return how_.same_samples ? 0 : index_ * allgather(n);
  }

  /// Bytes for the norm of each row: three numbers, and two in backward.
  double moments(double rows) const {
    auto all = how_.same_samples ? rows : peers_ * rows;
    return computed() * (allgather(3 * all) + allreduce(2 * all));
  }

  /// Bytes for a norm by squares.
  double squares(double rows) const {
    auto all = how_.same_samples ? rows : peers_ * rows;
    return computed() * 2 * allreduce(all);
  }

  // -- collectives ------------------------------------------------------------

  /// n: numbers that each rank contributes.
  double all_to_all(double n) const {
    return (peers_ - 1) / peers_ * n;
  }

  double allreduce(double n) const {
    return 2 * (peers_ - 1) / peers_ * n;
  }

  double allgather(double n) const {
    return (peers_ - 1) * n;
  }

  /// n: numbers that each rank gets.
  double reduce_scatter(double n) const {
    return (peers_ - 1) * n;
  }

  double size_of(const std::string& parameter, int64_t axis) const {
    return static_cast<double>(x_.parameters.at(parameter).size(axis));
  }

  double inputs_of(const transformer_layer_options::linear_place& x) const {
    return size_of(x.name + ".weight", x.inputs_first ? 0 : 1);
  }

  double outputs_of(const transformer_layer_options::linear_place& x) const {
    return size_of(x.name + ".weight", x.inputs_first ? 1 : 0);
  }

  /// Size of the type in which norms and losses are computed.
  double computed() const {
    return element_ > sizeof(float) ? element_ : sizeof(float);
  }

  static constexpr double index_ = sizeof(int64_t);

  const native_module& x_;
  const traced_calls& how_;
  double peers_;
  double bytes_;
  double element_;
};

} // namespace

std::optional<double> bytes_sent(const native_module& x,
                                 const traced_calls& how) {
  return counter{x, how}.run();
}

} // namespace smp::nn
