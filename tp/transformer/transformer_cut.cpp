#include "tp/transformer/transformer_cut.hpp"

#include "tp/refusals.hpp"
#include "tp/transformer/transformer_layer_options.hpp"

#include <set>
#include <utility>
#include <vector>

namespace smp::nn {

namespace {

using options = transformer_layer_options;

// -- slices -------------------------------------------------------------------

/// Computes one peer's slices of the parameters of a layer.
class cutter {
public:
  cutter(const native_module& x, int64_t rank, int64_t peers)
    : x_(x), rank_(rank), peers_(peers) {
    // nop
  }

  parameter_slices run() {
    // The names of a missing half match no parameter.
    auto& o = *x_.layer;
    auto blocks = o.query_key_value.size() == 1 ? 3 : 1;
    for (auto& place : o.query_key_value)
      first(place, blocks);
    first(o.intermediate, 1);
    first(o.gate, 1);
    second(o.attention_output);
    second(o.output);
    for (auto* place : {&o.attention_norm, &o.attention_post_norm,
                        &o.output_norm, &o.output_post_norm})
      norm(*place);
    if (auto& cross = o.cross_attention) {
      for (auto* place : {&cross->query, &cross->key, &cross->value})
        first(*place, 1);
      second(cross->output);
      norm(cross->norm);
      norm(cross->post_norm);
    }
    if (o.positions)
      cut(o.positions->name + ".weight", 1, 1);
    return std::move(result_);
  }

private:
  void first(const options::linear_place& place, int64_t blocks) {
    if (x_.saves_memory)
      return second(place);
    cut(place.name + ".weight", place.inputs_first ? 1 : 0, blocks);
    cut(place.name + ".bias", 0, blocks);
  }

  void second(const options::linear_place& place) {
    cut(place.name + ".weight", place.inputs_first ? 0 : 1, 1);
    if (x_.saves_memory)
      whole_on_first(place.name + ".bias");
  }

  void norm(const options::norm_place& place) {
    if (x_.saves_memory)
      for (auto* what : {".weight", ".bias"})
        cut(place.name + what, 0, 1);
  }

  void cut(const std::string& name, int64_t dim, int64_t blocks) {
    auto i = x_.parameters.find(name);
    if (i == x_.parameters.end())
      return;
    auto length = i->second.size(dim) / blocks / peers_;
    result_[name] = {dim, rank_ * length, length, i->second.sizes().vec(),
                     blocks};
  }

  /// Only one peer has it, as it is added before results are summed.
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

// -- what cannot be shared ----------------------------------------------------

/// Checks whether the parameters of a layer match its options.
class layer_check {
public:
  layer_check(const native_module& x, int64_t peers)
    : x_(x), o_(*x.layer), peers_(peers) {
    // nop
  }

  /// @returns why it cannot be shared, or nothing
  std::string run() {
    auto attends = o_.has_attention() || o_.cross_attention;
    if (!attends && !o_.has_output())
      return "its options name no linears; they have to say where its parts "
             "are";
    if (attends && o_.num_attention_heads < 1)
      return "it has no heads; its options have to say how many "
             "(num_attention_heads)";
    if (attends)
      divide(o_.num_attention_heads, "heads");
    auto channels = channels_of_layer();
    norms(o_.attention_norm, o_.attention_post_norm);
    norms(o_.output_norm, o_.output_post_norm);
    if (auto& cross = o_.cross_attention)
      norms(cross->norm, cross->post_norm);
    if (o_.has_attention())
      attention(o_.query_key_value, o_.attention_output, channels);
    if (auto& cross = o_.cross_attention)
      attention({cross->query, cross->key, cross->value}, cross->output,
                channels);
    if (o_.has_output())
      feed_forward(channels);
    if (x_.saves_memory)
      divide(channels, "channels");
    if (o_.positions)
      table(o_.positions->name);
    if (o_.positions && !(o_.takes_mask && o_.has_attention()))
      refuse(
        "biases of positions are added to a mask, and it takes none; "
        "its options have to say that it does (takes_mask)");
    for (auto& [name, t] : x_.parameters)
      if (!known_.contains(name))
        refuse("what it computes was told without its parameter '" + name
               + "'; its options have to name the module of that");
    return why_;
  }

private:
  struct sizes {
    int64_t in = 0;
    int64_t out = 0;
  };

  /// The first reason counts.
  void refuse(const std::string& why) {
    if (why_.empty())
      why_ = why;
  }

  void divide(int64_t n, const char* what) {
    if (!can_divide(n, peers_))
      refuse(refusal_to_divide(n, what, peers_) + " (its linears may be)");
  }

  /// @returns null if there is none with that many axes
  const at::Tensor* weight(const std::string& name, int64_t axes) {
    known_.insert({name + ".weight", name + ".bias"});
    auto i = x_.parameters.find(name + ".weight");
    if (i == x_.parameters.end())
      refuse("it has no parameter '" + name
             + ".weight'; its options have to name one that it has");
    else if (i->second.dim() != axes)
      refuse("its '" + name + ".weight' has " + std::to_string(i->second.dim())
             + " axes; " + std::to_string(axes) + " are expected");
    else
      return &i->second;
    return nullptr;
  }

  sizes sizes_of(const options::linear_place& x) {
    auto* w = weight(x.name, 2);
    if (!w)
      return {};
    return {w->size(x.inputs_first ? 0 : 1), w->size(x.inputs_first ? 1 : 0)};
  }

  void expect(const options::linear_place& x, const sizes& wanted) {
    auto found = sizes_of(x);
    if (found.in != wanted.in || found.out != wanted.out)
      refuse("its '" + x.name + "' goes from " + std::to_string(found.in)
             + " to " + std::to_string(found.out) + " channels, not from "
             + std::to_string(wanted.in) + " to " + std::to_string(wanted.out)
             + "; only a layer with these sizes can be shared as a whole");
  }

  /// The channels of the first part that exists.
  int64_t channels_of_layer() {
    if (o_.has_output())
      return sizes_of(o_.intermediate).in;
    return sizes_of(o_.has_attention() ? o_.attention_output
                                       : o_.cross_attention->output)
      .out;
  }

  void attention(const std::vector<options::linear_place>& inputs,
                 const options::linear_place& output, int64_t channels) {
    auto width = sizes_of(output).in;
    auto n = static_cast<int64_t>(inputs.size());
    if (n != 1 && n != 3)
      refuse("its attention begins with " + std::to_string(n)
             + " linears; its options have to name one, or three "
               "(query_key_value)");
    for (auto& x : inputs)
      expect(x, {channels, n == 1 ? 3 * width : width});
    expect(output, {width, channels});
    if (!can_divide(width, o_.num_attention_heads))
      refuse("its attention has " + std::to_string(width) + " channels for "
             + std::to_string(o_.num_attention_heads)
             + " heads; it has to be a multiple of these");
  }

  void feed_forward(int64_t channels) {
    auto inner = sizes_of(o_.intermediate).out;
    if (!o_.gate.name.empty())
      expect(o_.gate, {channels, inner});
    expect(o_.output, {inner, channels});
    divide(inner, "inner channels");
  }

  /// Parts that have no norm do not use these names.
  void norms(const options::norm_place& first,
             const options::norm_place& second) {
    if (o_.pre_layernorm || o_.post_layernorm)
      known_.insert({first.name + ".weight", first.name + ".bias"});
    if (o_.pre_layernorm && o_.post_layernorm)
      known_.insert({second.name + ".weight", second.name + ".bias"});
  }

  void table(const std::string& name) {
    if (auto* w = weight(name, 2); w && w->size(1) != o_.num_attention_heads)
      refuse("its '" + name + "' is for " + std::to_string(w->size(1))
             + " heads; it has to be for "
             + std::to_string(o_.num_attention_heads));
  }

  const native_module& x_;
  const options& o_;
  int64_t peers_;
  std::string why_;
  std::set<std::string> known_;
};

} // namespace

parameter_slices slices_of_layer(const native_module& x, int64_t rank,
                                 int64_t peers) {
  return cutter{x, rank, peers}.run();
}

std::string refusal_of_layer(const native_module& x, int64_t peers) {
  return layer_check{x, peers}.run();
}

} // namespace smp::nn
