#include "tp/linears.hpp"

#include "tp/refusals.hpp"
#include "tp/row_segments.hpp"
#include "tp/slices.hpp"
#include "tp/tensor_group.hpp"

#include <ATen/autocast_mode.h>
#include <ATen/ops/_unsafe_view.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <string>
#include <utility>

namespace smp::nn {

namespace {

namespace ag = torch::autograd;

/// [..., n] -> [any, n]
at::Tensor rows_of(const at::Tensor& x) {
  return x.reshape({-1, x.size(-1)});
}

// -- of the samples of all peers ----------------------------------------------

/// How rows of all peers are gathered to compute with them, and how results
/// return to the peer of their samples. Gathered rows are [batches, any, n]:
/// one batch per peer, or one in all if all peers have the same samples.
class row_exchange {
public:
  /// @param scatters results are summed over peers, each for its own samples
  row_exchange(entry how, bool scatters)
    : how_(how),
      scatters_(scatters),
      group_(tensor_group::current()),
      same_(group_.same_samples()),
      batches_(same_ ? 1 : static_cast<int64_t>(group_.size())) {
    // nop
  }

  int64_t batches() const {
    return batches_;
  }

  /// The batches of the input.
  int64_t batches_given() const {
    return how_ == entry::done ? batches_ : 1;
  }

  /// Tells whether the rows to compute with differ from the input.
  bool enters() const {
    return how_ == entry::exchange || (how_ == entry::gather && !same_);
  }

  /// @param rows of each batch
  /// @param weight [out, n]
  /// @param bytes of a number
  /// @returns the number of segments to travel in, by the larger side
  int64_t count(int64_t rows, const at::Tensor& weight, int64_t bytes) const {
    auto channels = std::max(how_ == entry::done ? 0 : weight.size(1),
                             scatters_ ? weight.size(0) : 0);
    return segment_count(rows, batches_ * rows * channels * bytes);
  }

  /// @returns one segment if nothing travels
  std::vector<row_segment> in_forward(int64_t count, int64_t rows) const {
    auto travels = scatters_ || (how_ != entry::done && !same_);
    return segments_of({travels ? count : 1}, rows);
  }

  std::vector<row_segment> in_backward(int64_t count, int64_t rows) const {
    auto travels = how_ != entry::done || (scatters_ && !same_);
    return segments_of({travels ? count : 1}, rows);
  }

  /// [batches given, any, c] -> [batches, any, n]
  tensor_group::pending begin_entry(const at::Tensor& x,
                                    const std::string& name) const {
    if (!enters())
      return [x] { return x; };
    auto rows = x.squeeze(0);
    if (how_ == entry::gather)
      return group_.begin_allgather(rows.contiguous(), name);
    auto by_channels = slices_of(rows, -1, group_.size());
    if (!same_)
      return group_.begin_all_to_all(by_channels, name);
    auto mine = by_channels.narrow(0, static_cast<int64_t>(group_.rank()), 1);
    return [mine] { return mine; };
  }

  /// The way back, for gradients.
  tensor_group::pending begin_return(const at::Tensor& x,
                                     const std::string& name) const {
    if (how_ == entry::done)
      return [x] { return x; };
    if (how_ == entry::gather)
      return same_ ? group_.begin_allreduce(x, name)
                   : group_.begin_reduce_scatter(x, name);
    auto end = same_ ? group_.begin_allgather(x.squeeze(0), name)
                     : group_.begin_all_to_all(x, name);
    return [end] { return merged(end(), 1); };
  }

  /// [batches, any, n], summands of each peer -> the sums of own samples
  tensor_group::pending begin_scatter(const at::Tensor& x,
                                      const std::string& name) const {
    return same_ ? group_.begin_allreduce(x, name)
                 : group_.begin_reduce_scatter(x, name);
  }

  /// The way back, for gradients [any, n].
  tensor_group::pending begin_gather(const at::Tensor& x,
                                     const std::string& name) const {
    if (!same_)
      return group_.begin_allgather(x, name);
    return [y = x.unsqueeze(0)] { return y; };
  }

private:
  entry how_;
  bool scatters_;
  tensor_group& group_;
  bool same_;
  int64_t batches_;
};

/// @returns `count` names, empty if they are not needed
std::vector<std::string> names_of_segments(int64_t count, bool needed) {
  std::vector<std::string> result(static_cast<size_t>(count));
  if (needed)
    for (auto& x : result)
      x = tensor_group::current().next_name();
  return result;
}

/// @param w the weight of this gradient; a transpose gets a transposed
/// gradient, so that its parameter's gradient has that parameter's layout
at::Tensor gradient_of_weight(const at::Tensor& w, const at::Tensor& rows,
                              const at::Tensor& grad) {
  auto transposed = w.stride(0) == 1 && w.stride(1) == w.size(0);
  auto result = transposed ? rows.t().mm(grad).t() : grad.t().mm(rows);
  return result.to(w.scalar_type());
}

/// @param position among them, or 0
/// @returns an undefined tensor if there is none, or another peer adds it
at::Tensor bias_of(at::TensorList parameters, int64_t position) {
  if (position == 0)
    return {};
  auto& result = parameters[static_cast<size_t>(position)];
  return result.numel() > 0 ? result : at::Tensor{};
}

struct linears_function : ag::Function<linears_function> {
  /// @param parameters the weights, and then the biases that exist
  /// @param biases for each weight, the position of its bias, or 0
  /// @param scatters results, of one linear, are summed over peers
  static ag::variable_list forward(ag::AutogradContext* c, const at::Tensor& x,
                                   at::TensorList parameters,
                                   const std::vector<int64_t>& biases,
                                   int64_t how, bool scatters) {
    row_exchange peers{static_cast<entry>(how), scatters};
    auto given = x.reshape({peers.batches_given(), -1, x.size(-1)});
    auto rows = given.size(1);
    auto count = peers.count(rows, parameters[0],
                             static_cast<int64_t>(x.element_size()));
    auto ins = names_of_segments(count, static_cast<entry>(how) != entry::done);
    auto outs = names_of_segments(count, scatters);
    auto segments = peers.in_forward(count, rows);
    at::Tensor all;
    ag::variable_list result(biases.size());
    overlap(
      segments,
      [&](size_t i) {
        auto& s = segments[i];
        return peers.begin_entry(given.narrow(1, s.begin, s.length), ins[i]);
      },
      [&](size_t i, const at::Tensor& here) {
        auto& s = segments[i];
        if (peers.enters())
          put_segment(all, s, rows, here);
        tensor_group::pending leaves;
        for (size_t j = 0; j < biases.size(); ++j) {
          auto y = at::linear(rows_of(here), parameters[j],
                              bias_of(parameters, biases[j]))
                     .unflatten(0, {peers.batches(), s.length});
          if (scatters)
            leaves = peers.begin_scatter(y, outs[i]);
          else
            put_segment(result[j], s, rows, y);
        }
        return leaves;
      },
      [&](const row_segment& s, const at::Tensor& sum) {
        put_segment(result[0], s, rows, sum);
      });
    auto sizes = x.sizes().vec();
    sizes[0] = sizes[0] / peers.batches_given() * peers.batches();
    sizes.back() = parameters[0].size(1);
    ag::variable_list kept{peers.enters() ? all.view(sizes) : x};
    kept.insert(kept.end(), parameters.begin(), parameters.end());
    if (scatters)
      sizes[0] /= peers.batches();
    for (auto& y : result) {
      sizes.back() = y.size(-1);
      y = at::_unsafe_view(y, sizes); // not a view, so it may be written to
    }
    c->save_for_backward(std::move(kept));
    c->saved_data["biases"] = biases;
    c->saved_data["how"] = how;
    c->saved_data["scatters"] = scatters;
    c->saved_data["rows"] = rows;
    c->saved_data["ins"] = ins;
    c->saved_data["outs"] = outs;
    return result;
  }

  static ag::variable_list backward(ag::AutogradContext* c,
                                    const ag::variable_list& grads) {
    refuse_second_derivatives("linear");
    auto kept = c->get_saved_variables();
    auto biases = c->saved_data["biases"].toIntVector();
    auto how = static_cast<entry>(c->saved_data["how"].toInt());
    auto scatters = c->saved_data["scatters"].toBool();
    auto rows = c->saved_data["rows"].toInt();
    auto ins = c->saved_data["ins"].to<std::vector<std::string>>();
    auto outs = c->saved_data["outs"].to<std::vector<std::string>>();
    row_exchange peers{how, scatters};
    auto segments = peers.in_backward(static_cast<int64_t>(ins.size()), rows);
    auto& all = kept[0];
    // Gradients of all peers; those of this one alone if they come first.
    ag::variable_list whole(grads.size());
    auto own = scatters ? rows_of(grads[0]).contiguous() : at::Tensor{};
    if (!scatters)
      for (size_t j = 0; j < whole.size(); ++j)
        whole[j] = grads[j].reshape({peers.batches(), rows, grads[j].size(-1)});
    at::Tensor input;
    ag::variable_list result(kept.size() + 3);
    overlap(
      segments,
      [&](size_t i) -> tensor_group::pending {
        auto& s = segments[i];
        if (scatters)
          return peers.begin_gather(own.narrow(0, s.begin, s.length), outs[i]);
        return [] { return at::Tensor{}; };
      },
      [&](size_t i, const at::Tensor& here) {
        auto& s = segments[i];
        if (scatters)
          put_segment(whole[0], s, rows, here);
        tensor_group::pending leaves;
        if (c->needs_input_grad(0))
          leaves = peers.begin_return(
            gradient_of_input(kept, whole, s)
              .view({peers.batches(), s.length, all.size(-1)}),
            ins[i]);
        if (i + 1 == segments.size()) // while the last ones travel
          differentiate_parameters(c, kept, biases, whole, result);
        return leaves;
      },
      [&](const row_segment& s, const at::Tensor& x) {
        put_segment(input, s, rows, x);
      });
    if (input.defined()) {
      auto sizes = all.sizes().vec();
      if (how != entry::done)
        sizes[0] /= peers.batches();
      sizes.back() = input.size(-1);
      result[0] = input.view(sizes);
    }
    return result;
  }

private:
  /// @param grads [batches, rows, out] of each linear, at least that segment
  /// @returns [batches length, n]
  static at::Tensor gradient_of_input(const ag::variable_list& kept,
                                      const ag::variable_list& grads,
                                      const row_segment& s) {
    at::Tensor result;
    for (size_t i = 0; i < grads.size(); ++i) {
      auto& grad = grads[i]; // of another type with autocast
      auto part = rows_of(grad.narrow(1, s.begin, s.length))
                    .mm(kept[1 + i].to(grad.scalar_type()));
      result = result.defined() ? result.add_(part) : part;
    }
    return result.to(kept[0].scalar_type());
  }

  /// @param grads [batches, rows, out] of each linear
  static void differentiate_parameters(ag::AutogradContext* c,
                                       const ag::variable_list& kept,
                                       const std::vector<int64_t>& biases,
                                       const ag::variable_list& grads,
                                       ag::variable_list& to) {
    auto& all = kept[0];
    auto rows = rows_of(all).to(grads[0].scalar_type());
    for (size_t i = 0; i < biases.size(); ++i) {
      auto at = static_cast<size_t>(biases[i]);
      auto grad = rows_of(grads[i]);
      if (c->needs_input_grad(1 + i))
        to[1 + i] = gradient_of_weight(kept[1 + i], rows, grad);
      if (at > 0 && c->needs_input_grad(1 + at))
        to[1 + at] = kept[1 + at].numel() > 0
                       ? grad.sum(0).to(all.scalar_type())
                       : at::zeros_like(kept[1 + at]);
    }
  }
};

// -- what peers add up --------------------------------------------------------

/// A linear whose results peers add up: each gets a part of each output block.
struct reduced_linear {
  at::Tensor weight; // [T blocks n, in]
  at::Tensor bias;   // undefined if none, or another peer adds it
  int64_t peers;
  int64_t blocks;

  /// blocks n
  int64_t outputs_of_peer() const {
    return weight.size(0) / peers;
  }

  /// Calls f(part, of) for the outputs of peer k in each block: `part` in [T,
  /// any, blocks n], and `of`, which narrows the axis of all outputs to them.
  template <class F>
  void for_each_part(const at::Tensor& by_peer, F f) const {
    auto n = outputs_of_peer() / blocks;
    for (int64_t k = 0; k < peers; ++k)
      for (int64_t b = 0; b < blocks; ++b)
        f(by_peer.select(0, k).narrow(1, b * n, n),
          [first = (b * peers + k) * n, n](const at::Tensor& x) {
            return x.narrow(0, first, n);
          });
  }

  /// [any, in] -> [T, any, blocks n]: in the layout sent, without a copy.
  at::Tensor product(const at::Tensor& rows) const {
    auto result = at::empty({peers, rows.size(0), outputs_of_peer()},
                            rows.options());
    for_each_part(result, [&](at::Tensor part, auto of) {
      if (bias.defined())
        at::addmm_out(part, of(bias), rows, of(weight).t());
      else
        at::mm_out(part, rows, of(weight).t());
    });
    return result;
  }

  /// @param grad of the result of `product`
  /// @param beta 0, or 1: adds to what is there
  void differentiate_rows(const at::Tensor& grad, double beta,
                          const at::Tensor& to) const {
    for_each_part(grad, [&](const at::Tensor& part, auto of) {
      to.addmm_(part, of(weight), std::exchange(beta, 1));
    });
  }

  void differentiate_weight(const at::Tensor& grad, const at::Tensor& rows,
                            double beta, const at::Tensor& to) const {
    for_each_part(grad, [&](const at::Tensor& part, auto of) {
      of(to).addmm_(part.t(), rows, beta);
    });
  }

  void differentiate_bias(const at::Tensor& grad, const at::Tensor& to) const {
    for_each_part(
      grad, [&](const at::Tensor& part, auto of) { of(to).add_(part.sum(0)); });
  }
};

/// @returns an uninitialized tensor with the layout of `x`
at::Tensor room_for(const at::Tensor& x, at::ScalarType type) {
  return at::empty_like(x, x.options().dtype(type));
}

/// Operations that write into a given tensor are not cast by autocast.
bool casts_products(const at::Tensor& x) {
  return at::autocast::is_autocast_enabled(x.device().type())
         && x.scalar_type() != at::kDouble;
}

struct reduced_linears_function : ag::Function<reduced_linears_function> {
  /// @param parameters, biases as above
  static ag::variable_list forward(ag::AutogradContext* c, const at::Tensor& x,
                                   at::TensorList parameters,
                                   const std::vector<int64_t>& biases,
                                   int64_t blocks) {
    auto& group = tensor_group::current();
    auto cast = casts_products(x);
    auto type = cast ? at::autocast::get_autocast_dtype(x.device().type())
                     : x.scalar_type();
    auto linears = linears_of(parameters, biases, blocks);
    auto rows = rows_of(x).to(type);
    std::vector<int64_t> counts;
    for (auto& y : linears) {
      if (cast) {
        y.weight = y.weight.to(type);
        y.bias = y.bias.defined() ? y.bias.to(type) : y.bias;
      }
      counts.push_back(segment_count(
        rows.size(0), rows.size(0) * y.weight.size(0)
                        * static_cast<int64_t>(rows.element_size())));
    }
    ag::variable_list result(linears.size());
    std::vector<std::string> names;
    auto segments = segments_of(counts, rows.size(0));
    overlap(
      segments,
      [&](size_t i) {
        auto& s = segments[i];
        names.push_back(group.next_name());
        return group.begin_reduce_scatter(
          linears[s.linear].product(rows.narrow(0, s.begin, s.length)),
          names.back());
      },
      [&](const row_segment& s, const at::Tensor& sum) {
        put_segment(result[s.linear], s, rows.size(0), sum);
      });
    auto sizes = x.sizes().vec();
    for (auto& y : result) {
      sizes.back() = y.size(1);
      y = y.view(sizes);
    }
    ag::variable_list kept{x};
    kept.insert(kept.end(), parameters.begin(), parameters.end());
    c->save_for_backward(std::move(kept));
    c->saved_data["biases"] = biases;
    c->saved_data["blocks"] = blocks;
    c->saved_data["counts"] = counts;
    c->saved_data["names"] = names;
    return result;
  }

  static ag::variable_list backward(ag::AutogradContext* c,
                                    const ag::variable_list& grads) {
    refuse_second_derivatives("linear");
    auto& group = tensor_group::current();
    auto kept = c->get_saved_variables();
    auto biases = c->saved_data["biases"].toIntVector();
    auto names = c->saved_data["names"].to<std::vector<std::string>>();
    auto& x = kept[0];
    auto type = grads[0].scalar_type(); // another one with autocast
    auto rows = rows_of(x).to(type);
    auto linears = linears_of(at::TensorList{kept}.slice(1), biases,
                              c->saved_data["blocks"].toInt());
    for (auto& y : linears)
      y.weight = y.weight.to(type);
    ag::variable_list result(kept.size() + 2);
    if (c->needs_input_grad(0))
      result[0] = room_for(rows, type);
    for (size_t i = 0; i < linears.size(); ++i) {
      auto at = static_cast<size_t>(biases[i]);
      if (c->needs_input_grad(1 + i))
        result[1 + i] = room_for(kept[1 + i], type);
      if (at > 0 && c->needs_input_grad(1 + at))
        result[1 + at] = at::zeros_like(kept[1 + at]);
    }
    auto segments = segments_of(c->saved_data["counts"].toIntVector(),
                                rows.size(0));
    at::Tensor given; // of the linear whose rows are sent
    overlap(
      segments,
      [&](size_t i) {
        auto& s = segments[i];
        if (s.begin == 0)
          given = rows_of(grads[s.linear]).contiguous();
        return group.begin_allgather(given.narrow(0, s.begin, s.length),
                                     names.at(i));
      },
      [&](const row_segment& s, const at::Tensor& grad) {
        auto& y = linears[s.linear];
        auto mine = rows.narrow(0, s.begin, s.length);
        auto bias = static_cast<size_t>(biases[s.linear]);
        if (result[0].defined())
          y.differentiate_rows(grad, s.linear > 0 ? 1 : 0,
                               result[0].narrow(0, s.begin, s.length));
        if (auto& to = result[1 + s.linear]; to.defined())
          y.differentiate_weight(grad, mine, s.begin > 0 ? 1 : 0, to);
        if (y.bias.defined() && result[1 + bias].defined())
          y.differentiate_bias(grad, result[1 + bias]);
      });
    return in_types_of(kept, std::move(result));
  }

private:
  static std::vector<reduced_linear>
  linears_of(at::TensorList parameters, const std::vector<int64_t>& biases,
             int64_t blocks) {
    auto peers = static_cast<int64_t>(tensor_group::current().size());
    std::vector<reduced_linear> result;
    for (size_t i = 0; i < biases.size(); ++i)
      result.push_back(
        {parameters[i], bias_of(parameters, biases[i]), peers, blocks});
    return result;
  }

  static ag::variable_list in_types_of(const ag::variable_list& xs,
                                       ag::variable_list grads) {
    for (size_t i = 0; i < xs.size(); ++i)
      if (grads[i].defined())
        grads[i] = grads[i].to(xs[i].scalar_type()).view_as(xs[i]);
    return grads;
  }
};

/// The parameters of both kinds of functions: weights, then the biases that
/// exist, and the position of each weight's bias.
struct linear_parameters {
  std::vector<at::Tensor> all;
  std::vector<int64_t> biases;

  linear_parameters(std::span<const at::Tensor> weights,
                    std::span<const at::Tensor> given)
    : all(weights.begin(), weights.end()), biases(weights.size(), 0) {
    for (size_t i = 0; i < given.size(); ++i)
      if (given[i].defined()) {
        biases[i] = static_cast<int64_t>(all.size());
        all.push_back(given[i]);
      }
  }
};

} // namespace

std::vector<at::Tensor> linears_for_tp(const at::Tensor& x, entry how,
                                       std::span<const at::Tensor> weights,
                                       std::span<const at::Tensor> biases) {
  linear_parameters p{weights, biases};
  return linears_function::apply(x, at::TensorList{p.all}, p.biases,
                                 static_cast<int64_t>(how), false);
}

at::Tensor scattered_linear_for_tp(const at::Tensor& x, entry how,
                                   const at::Tensor& weight,
                                   const at::Tensor& bias) {
  linear_parameters p{{&weight, 1}, {&bias, 1}};
  return linears_function::apply(x, at::TensorList{p.all}, p.biases,
                                 static_cast<int64_t>(how), true)
    .front();
}

std::vector<at::Tensor>
reduced_linears_for_tp(const at::Tensor& x, std::span<const at::Tensor> weights,
                       std::span<const at::Tensor> biases, int64_t blocks) {
  linear_parameters p{weights, biases};
  return reduced_linears_function::apply(x, at::TensorList{p.all}, p.biases,
                                         blocks);
}

} // namespace smp::nn
