#include "runtime/device/moved_tensors.hpp"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/TensorImpl.h>

#include <algorithm>
#include <map>

namespace smp {

namespace {

at::Tensor bytes_of(const c10::Storage& x) {
  return at::for_blob(const_cast<void*>(x.data()),
                      {static_cast<int64_t>(x.nbytes())})
    .options(at::TensorOptions{at::kByte}.device(x.device()))
    .target_device(x.device())
    .make_tensor();
}

/// @returns a tensor like `x` over the memory of `bytes`
at::Tensor over(const at::Tensor& bytes, const at::Tensor& x) {
  auto keys = c10::DispatchKeySet{
    c10::computeDispatchKey(x.scalar_type(), c10::kStrided, bytes.device())};
  auto result = at::detail::make_tensor<c10::TensorImpl>(
    c10::Storage{bytes.storage()}, keys, x.dtype());
  result.unsafeGetTensorImpl()->set_sizes_and_strides(x.sizes(), x.strides(),
                                                      x.storage_offset());
  return result;
}

} // namespace

void move_in_place(std::vector<at::Tensor> xs, c10::Device to) {
  at::NoGradGuard no_grad;
  std::erase_if(xs, [to](auto& x) {
    return !x.defined() || x.device() == to || !x.has_storage();
  });
  std::stable_sort(xs.begin(), xs.end(), [](auto& x, auto& y) {
    return x.storage().nbytes() > y.storage().nbytes();
  });
  std::map<const c10::StorageImpl*, at::Tensor> moved;
  for (auto& x : xs) {
    auto& bytes = moved[x.storage().unsafeGetStorageImpl()];
    if (!bytes.defined()) {
      bytes = at::empty({static_cast<int64_t>(x.storage().nbytes())},
                        at::TensorOptions{at::kByte}.device(to));
      bytes.copy_(bytes_of(x.storage()));
    }
    auto gradient = x.grad();
    x.mutable_grad() = at::Tensor{};
    x.set_data(over(bytes, x));
    if (gradient.defined())
      x.mutable_grad() = gradient.to(to);
  }
}

} // namespace smp
