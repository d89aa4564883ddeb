#include "runtime/device/arriving_tensors.hpp"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <utility>

namespace smp {

namespace {

at::Tensor over(const c10::Storage& memory, at::ScalarType type,
                at::IntArrayRef sizes, at::IntArrayRef strides) {
  auto result = at::empty({0}, at::TensorOptions{type}.device(memory.device()));
  return result.set_(memory, 0, sizes, strides);
}

bool can_move(const at::Tensor& x) {
  return x.defined() && x.is_cpu() && x.layout() == at::kStrided
         && x.numel() > 0 && !x.requires_grad();
}

} // namespace

arriving_tensors::arriving_tensors(const storage_copies& copies,
                                   std::vector<at::Tensor> xs)
  : xs_(std::move(xs)) {
  at::NoGradGuard no_grad;
  for (size_t i = 0; i < xs_.size(); ++i) {
    auto& x = xs_[i];
    if (!can_move(x))
      continue;
    // The same order of axes (R63), without gaps.
    auto like = at::empty_like(x, x.options().device(at::kMeta));
    auto pinned = over(copies.pinned(like.nbytes()), x.scalar_type(), x.sizes(),
                       like.strides());
    pinned.copy_(x);
    auto there = copies.to_device(pinned.storage(), pinned.nbytes(), 0,
                                  nullptr);
    moving_.push_back({i, std::move(pinned), std::move(there)});
  }
}

std::vector<at::Tensor> arriving_tensors::take() {
  auto result = std::exchange(xs_, {});
  for (auto& x : moving_)
    result[x.index] = over(x.there->take(), x.pinned.scalar_type(),
                           x.pinned.sizes(), x.pinned.strides());
  return result;
}

} // namespace smp
