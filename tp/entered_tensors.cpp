#include "tp/entered_tensors.hpp"

#include "tp/tensor_group.hpp"

#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>

namespace smp {

namespace {

bool in_graph(const at::Tensor& x) {
  return x.requires_grad() && at::GradMode::is_enabled();
}

/// Autograd cannot save tensors that were made in inference mode.
bool fits_mode(const at::Tensor& entered) {
  return !entered.is_inference() || c10::InferenceMode::is_enabled();
}

} // namespace

at::Tensor entered_tensors::find(const at::Tensor& x, form how,
                                 int64_t samples) {
  std::erase_if(entries_, [](const entry& y) { return y.tensor.expired(); });
  auto i = std::ranges::find_if(entries_, [&](const entry& y) {
    return y.tensor._unsafe_get_target() == x.unsafeGetTensorImpl()
           && y.how == how && y.samples == samples && y.version == x._version()
           && y.has_gradient == in_graph(x) && fits_mode(y.entered);
  });
  return i == entries_.end() ? at::Tensor{} : i->entered;
}

void entered_tensors::add(const at::Tensor& x, form how, int64_t samples,
                          const at::Tensor& entered) {
  if (x.is_inference()) // it has no version to show writes
    return;
  using weak = decltype(entry::tensor);
  entries_.push_back({weak{x.getIntrusivePtr()}, x._version(), in_graph(x), how,
                      samples, entered});
}

at::Tensor enter_once(const at::Tensor& x, entered_tensors::form how,
                      int64_t samples,
                      const std::function<at::Tensor()>& enter) {
  auto& group = tensor_group::current();
  auto* known = group.entered();
  if (!known)
    return enter();
  if (auto found = known->find(x, how, samples); found.defined()) {
    // The name is used up all the same: a peer that finds nothing waits for
    // this rank, rather than match the next collective.
    group.next_name();
    return found;
  }
  auto result = enter();
  known->add(x, how, samples, result);
  return result;
}

} // namespace smp
