#include "tp/linears.hpp"

#include "tp/slices.hpp"
#include "tp/tensor_group.hpp"

#include <ATen/autocast_mode.h>
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

/// @returns the samples of all peers
at::Tensor entered(const at::Tensor& x, entry how, const std::string& name) {
  if (how == entry::done)
    return x;
  auto& group = tensor_group::current();
  auto by_channels = [&] { return slices_of(x, x.dim() - 1, group.size()); };
  if (group.same_samples())
    return how == entry::gather
             ? x
             : by_channels().select(0, static_cast<int64_t>(group.rank()));
  return merged(how == entry::gather ? group.allgather(x.contiguous(), name)
                                     : group.all_to_all(by_channels(), name),
                0);
}

/// Begins what takes the gradient of all samples to whose they are.
tensor_group::pending begin_return(const at::Tensor& x, entry how,
                                   const std::string& name) {
  if (how == entry::done)
    return [x] { return x; };
  auto& group = tensor_group::current();
  if (group.same_samples())
    return how == entry::gather ? group.begin_allreduce(x, name)
                                : group.begin_allgather(x, name);
  auto parts = slices_of(x, 0, group.size());
  return how == entry::gather ? group.begin_reduce_scatter(parts, name)
                              : group.begin_all_to_all(parts, name);
}

/// @param w whose gradient it is; one that is a transpose gets a transpose, so
/// that its parameter has one as it is in memory
at::Tensor gradient_of_weight(const at::Tensor& w, const at::Tensor& rows,
                              const at::Tensor& grad) {
  auto transposed = w.stride(0) == 1 && w.stride(1) == w.size(0);
  auto result = transposed ? rows.t().mm(grad).t() : grad.t().mm(rows);
  return result.to(w.scalar_type());
}

/// @param position among them, or 0
/// @returns an undefined one if there is none, or a peer adds it
at::Tensor bias_of(at::TensorList parameters, int64_t position) {
  if (position == 0)
    return {};
  auto& result = parameters[static_cast<size_t>(position)];
  return result.numel() > 0 ? result : at::Tensor{};
}

struct linears_function : ag::Function<linears_function> {
  /// @param parameters the weights, and then the biases that there are
  /// @param biases for each weight, the position of its bias, or 0
  static ag::variable_list forward(ag::AutogradContext* c, const at::Tensor& x,
                                   at::TensorList parameters,
                                   const std::vector<int64_t>& biases,
                                   int64_t how, const std::string& name) {
    auto all = entered(x, static_cast<entry>(how), name);
    ag::variable_list result;
    for (size_t i = 0; i < biases.size(); ++i) {
      result.push_back(
        at::linear(all, parameters[i], bias_of(parameters, biases[i])));
    }
    ag::variable_list kept{all};
    kept.insert(kept.end(), parameters.begin(), parameters.end());
    c->save_for_backward(std::move(kept));
    c->saved_data["biases"] = biases;
    c->saved_data["parameters"] = static_cast<int64_t>(parameters.size());
    c->saved_data["how"] = how;
    c->saved_data["name"] = name;
    return result;
  }

  static ag::variable_list backward(ag::AutogradContext* c,
                                    const ag::variable_list& grads) {
    auto kept = c->get_saved_variables();
    auto biases = c->saved_data["biases"].toIntVector();
    auto how = static_cast<entry>(c->saved_data["how"].toInt());
    auto count = static_cast<size_t>(c->saved_data["parameters"].toInt());
    auto& all = kept[0];
    auto type = grads[0].scalar_type(); // another one with autocast
    tensor_group::pending input;
    if (c->needs_input_grad(0)) {
      at::Tensor sum;
      for (size_t i = 0; i < biases.size(); ++i) {
        auto part = rows_of(grads[i]).mm(kept[i + 1].to(type));
        sum = sum.defined() ? sum.add_(part) : part;
      }
      input = begin_return(sum.to(all.scalar_type()).view_as(all), how,
                           c->saved_data["name"].toStringRef());
    }
    ag::variable_list result(1 + count + 3);
    auto rows = rows_of(all).to(type);
    for (size_t i = 0; i < biases.size(); ++i) {
      auto at = static_cast<size_t>(biases[i]);
      auto grad = rows_of(grads[i]);
      if (c->needs_input_grad(1 + i))
        result[1 + i] = gradient_of_weight(kept[i + 1], rows, grad);
      if (at > 0 && c->needs_input_grad(1 + at))
        result[1 + at] = kept[1 + at].numel() > 0
                           ? grad.sum(0).to(all.scalar_type())
                           : at::zeros_like(kept[1 + at]);
    }
    if (input)
      result[0] = how == entry::exchange ? merged(input(), all.dim() - 1)
                                         : input();
    return result;
  }
};

// -- what peers add up --------------------------------------------------------

/// One whose results peers add up, each a part of them, by blocks of outputs.
struct reduced_linear {
  at::Tensor weight; // [T blocks n, in]
  at::Tensor bias;   // undefined if there is none, or a peer adds it
  int64_t peers;
  int64_t blocks;

  /// blocks n
  int64_t outputs_of_peer() const {
    return weight.size(0) / peers;
  }

  /// Calls f(part, whole) for the outputs of peer k in each block: where they
  /// are in [T, any, blocks n] and along the axis of all.
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

  /// [any, in] -> [T, any, blocks n]: as it travels, without a copy.
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

  /// @param grad of what `product` gave
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

/// Rows of a linear that travel together.
struct row_segment {
  size_t linear;
  int64_t begin;
  int64_t length;
};

/// In how many segments the rows of a result travel: in several if none gets
/// small.
int64_t segment_count(int64_t rows, int64_t bytes) {
  constexpr int64_t least = 4 << 20, most = 4;
  return std::clamp(bytes / least, int64_t{1},
                    std::clamp(rows, int64_t{1}, most));
}

/// @param counts by linear
std::vector<row_segment> segments_of(const std::vector<int64_t>& counts,
                                     int64_t rows) {
  std::vector<row_segment> result;
  for (size_t i = 0; i < counts.size(); ++i)
    for (int64_t k = 0, n = counts[i]; k < n; ++k)
      result.push_back({i, k * rows / n, (k + 1) * rows / n - k * rows / n});
  return result;
}

/// Begins each before it waits for the one before: two are on their way.
template <class Begin, class End>
void overlap(const std::vector<row_segment>& xs, Begin begin, End end) {
  tensor_group::pending last;
  for (size_t i = 0; i < xs.size(); ++i) {
    auto next = begin(i);
    if (last)
      end(xs[i - 1], last());
    last = std::move(next);
  }
  if (last)
    end(xs.back(), last());
}

/// @returns one to write into that is laid out as `x`
at::Tensor room_for(const at::Tensor& x, at::ScalarType type) {
  return at::empty_like(x, x.options().dtype(type));
}

/// Operations that write into a given tensor do not cast by themselves.
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
        auto& to = result[s.linear];
        if (s.length == rows.size(0)) {
          to = sum;
          return;
        }
        if (!to.defined())
          to = at::empty({rows.size(0), sum.size(1)}, rows.options());
        to.narrow(0, s.begin, s.length).copy_(sum);
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
    at::Tensor given; // of the linear whose rows leave
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

/// What both kinds of functions take: weights, and then the biases that there
/// are, with the position of each weight's.
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
  auto name = how == entry::done ? std::string{}
                                 : tensor_group::current().next_name();
  return linears_function::apply(x, at::TensorList{p.all}, p.biases,
                                 static_cast<int64_t>(how), name);
}

std::vector<at::Tensor>
reduced_linears_for_tp(const at::Tensor& x, std::span<const at::Tensor> weights,
                       std::span<const at::Tensor> biases, int64_t blocks) {
  linear_parameters p{weights, biases};
  return reduced_linears_function::apply(x, at::TensorList{p.all}, p.biases,
                                         blocks);
}

} // namespace smp::nn
