#include "tp/linears.hpp"

#include "tp/slices.hpp"
#include "tp/tensor_group.hpp"

#include <ATen/ops/linear.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/custom_function.h>

#include <string>

namespace smp::nn {

namespace {

namespace ag = torch::autograd;

/// [..., n] -> [any, n]
at::Tensor rows_of(const at::Tensor& x) {
  return x.reshape({-1, x.size(-1)});
}

/// @returns the samples of all peers
at::Tensor entered(const at::Tensor& x, entry how, const std::string& name) {
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
      auto bias = biases[i] > 0 ? parameters[static_cast<size_t>(biases[i])]
                                : at::Tensor{};
      if (bias.defined() && bias.numel() == 0)
        bias.reset();
      result.push_back(at::linear(all, parameters[i], bias));
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
      result[0] = how == entry::gather ? input()
                                       : merged(input(), all.dim() - 1);
    return result;
  }
};

} // namespace

std::vector<at::Tensor> linears_for_tp(const at::Tensor& x, entry how,
                                       std::span<const at::Tensor> weights,
                                       std::span<const at::Tensor> biases) {
  std::vector<at::Tensor> parameters{weights.begin(), weights.end()};
  std::vector<int64_t> at(weights.size(), 0);
  for (size_t i = 0; i < biases.size(); ++i)
    if (biases[i].defined()) {
      at[i] = static_cast<int64_t>(parameters.size());
      parameters.push_back(biases[i]);
    }
  return linears_function::apply(x, at::TensorList{parameters}, at,
                                 static_cast<int64_t>(how),
                                 tensor_group::current().next_name());
}

} // namespace smp::nn
