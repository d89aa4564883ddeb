#include "runtime/nn/lm_head.hpp"

#include "runtime/sharing/tp_register.hpp"

#include <torch/nn/functional/linear.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/container/any_value.h>

#include <utility>
#include <vector>

namespace smp::nn {

namespace {

namespace F = torch::nn::functional;

[[maybe_unused]] const bool registered = tp_register<lm_head_impl,
                                                     distributed_lm_head>(
  [](const lm_head_impl& x) { return lm_head_options{.loss = x.options}; },
  [](const at::Tensor& hidden, const std::optional<at::Tensor>& labels) {
    return labels ? std::vector{hidden, *labels} : std::vector{hidden};
  });

} // namespace

lm_head_impl::lm_head_impl(at::Tensor w, cross_entropy_options x, at::Tensor b)
  : weight(register_parameter("weight", std::move(w))), options(x) {
  if (b.defined())
    bias = register_parameter("bias", std::move(b));
}

at::Tensor lm_head_impl::forward(const at::Tensor& hidden,
                                 const std::optional<at::Tensor>& labels) {
  auto logits = F::linear(hidden, weight, bias);
  if (!labels)
    return logits;
  auto how = F::CrossEntropyFuncOptions().ignore_index(options.ignore_index);
  if (options.mean)
    how.reduction(torch::kMean);
  else
    how.reduction(torch::kSum);
  if (logits.scalar_type() != torch::kDouble)
    logits = logits.to(torch::kFloat);
  return F::cross_entropy(logits.flatten(0, -2), labels->flatten(), how);
}

} // namespace smp::nn
