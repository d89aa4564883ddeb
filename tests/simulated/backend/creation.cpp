#include "tests/simulated/backend/creation.hpp"

#include "tests/simulated/backend/kernels.hpp"
#include "tests/simulated/backend/sim_device.hpp"
#include "tests/simulated/driver/memory.hpp"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/set_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>

namespace smp::sim {

namespace {

constexpr c10::DispatchKeySet keys{c10::DispatchKey::PrivateUse1};

c10::Device device_or_current(std::optional<at::Device> x,
                              std::optional<bool> pin) {
  TORCH_CHECK(!pin.value_or(false), "only tensors of the host can be pinned");
  return x.value_or(at::Device{sim_type});
}

bool is_dense(const at::Tensor& x) {
  return is_ours(x) || (x.is_cpu() && x.layout() == at::kStrided);
}

} // namespace

void resize_storage(const c10::Storage& storage, size_t bytes) {
  auto* impl = storage.unsafeGetStorageImpl();
  TORCH_CHECK(impl->resizable(), "the storage cannot be resized");
  c10::DeviceGuard guard{impl->device()};
  auto fresh = impl->allocator()->allocate(bytes);
  if (auto kept = std::min(bytes, impl->nbytes()); kept > 0)
    impl->allocator()->copy_data(fresh.get(), impl->data(), kept);
  impl->set_data_ptr_noswap(std::move(fresh));
  impl->set_nbytes(bytes);
}

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout>, std::optional<at::Device> device,
                 std::optional<bool> pin,
                 std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard{device_or_current(device, pin)};
  return at::detail::empty_generic(size, c10::GetAllocator(sim_type), keys,
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride,
                         std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>,
                         std::optional<at::Device> device,
                         std::optional<bool> pin) {
  c10::DeviceGuard guard{device_or_current(device, pin)};
  return at::detail::empty_strided_generic(size, stride,
                                           c10::GetAllocator(sim_type), keys,
                                           c10::dtype_or_default(dtype));
}

const at::Tensor& resize_(const at::Tensor& x, at::IntArrayRef size,
                          std::optional<at::MemoryFormat> format) {
  auto* impl = x.unsafeGetTensorImpl();
  if (impl->sizes() == size && !format)
    return x;
  impl->set_sizes_contiguous(size);
  if (format && *format != at::MemoryFormat::Preserve)
    impl->empty_tensor_restride(*format);
  auto needed = at::detail::computeStorageNbytes(
    x.sizes(), x.strides(), x.element_size(),
    static_cast<size_t>(x.storage_offset()));
  if (needed > x.storage().nbytes())
    resize_storage(x.storage(), needed);
  return x;
}

at::Tensor& set_storage_and_shape(at::Tensor& x, at::Storage storage,
                                  int64_t offset, at::IntArrayRef size,
                                  at::IntArrayRef stride) {
  auto* impl = x.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(offset);
  if (stride.data() == nullptr || stride.size() != size.size())
    impl->set_sizes_contiguous(size);
  else
    impl->set_sizes_and_strides(size, stride);
  return x;
}

at::Tensor& set_storage(at::Tensor& x, at::Storage storage) {
  return at::native::set_(x, std::move(storage));
}

at::Tensor& set_tensor(at::Tensor& x, const at::Tensor& source) {
  return at::native::set_tensor_(x, source);
}

at::Tensor& set_nothing(at::Tensor& x) {
  at::Storage nothing{at::Storage::use_byte_size_t{}, 0,
                      c10::GetAllocator(sim_type), true};
  return set_storage_and_shape(x, std::move(nothing), 0, {0}, {});
}

void record_stream(at::Tensor& x, c10::Stream user) {
  use_on(x.storage().data_ptr().get_context(), user.device_index(), user.id());
}

bool has_compatible_type(const at::Tensor& x, const at::Tensor& y) {
  return is_dense(x) && is_dense(y);
}

} // namespace smp::sim
