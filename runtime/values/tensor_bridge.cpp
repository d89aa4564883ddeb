#include "runtime/values/tensor_bridge.hpp"

#include "runtime/base/fault.hpp"
#include "runtime/base/fnv_hash.hpp"
#include "runtime/base/rank_context.hpp"
#include "runtime/device/rank_device.hpp"
#include "runtime/values/absent_tensor.hpp"
#include "transport/error.hpp"

#include <ATen/EmptyTensor.h>
#include <ATen/ExpandUtils.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/DimVector.h>
#include <c10/util/strides.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>

namespace smp {

namespace {

/// @returns the size of an element in bytes, or 0 if the type cannot be sent.
size_t element_size(c10::ScalarType x) noexcept {
  switch (x) {
#define SMP_CASE(type, name)                                                   \
  case c10::ScalarType::name:                                                  \
    return sizeof(type);
    AT_FORALL_SCALAR_TYPES_WITH_COMPLEX(SMP_CASE)
    SMP_CASE(uint16_t, UInt16)
    SMP_CASE(uint32_t, UInt32)
    SMP_CASE(uint64_t, UInt64)
    SMP_CASE(c10::Float4_e2m1fn_x2, Float4_e2m1fn_x2)
#undef SMP_CASE
    default:
      return 0;
  }
}

[[noreturn]] void refuse(const std::string& what) {
  throw error(error_code::unsupported,
              what + " cannot be sent to another rank");
}

/// @returns the kind of `x` if it cannot be sent; empty if it can
std::string unsendable(const at::Tensor& x) {
  if (!x.defined())
    return "an undefined tensor";
  if (x.is_nested())
    return "a nested tensor";
  if (x.is_quantized())
    return "a quantised tensor";
  if (x.layout() != c10::kStrided)
    return "a sparse tensor";
  auto mine = rank_context::current_device();
  if (!x.device().is_cpu() && x.device() != mine)
    return "a tensor on device " + x.device().str()
           + (mine.is_cpu()
                ? ""
                : ", while this rank computes on " + mine.str() + ",");
  if (element_size(x.scalar_type()) == 0)
    return std::string{"a tensor of dtype "} + c10::toString(x.scalar_type());
  if (!x.has_storage())
    return "a tensor without memory of its own";
  return {};
}

/// @returns a tensor whose bytes, one after the other, are the elements of `x`.
at::Tensor without_gaps(const at::Tensor& x, bool snapshot) {
  if (!snapshot && x.is_non_overlapping_and_dense() && !x.is_conj()
      && !x.is_neg() && !x._is_zerotensor())
    return x;
  c10::AutoGradMode off{false};
  auto plain = x.detach();
  // A zero tensor has a shape but no memory until it is cloned.
  if (snapshot || plain._is_zerotensor())
    plain = plain.clone();
  plain = plain.resolve_conj().resolve_neg();
  return plain.is_non_overlapping_and_dense() ? plain : plain.clone();
}

[[noreturn]] void malformed(const std::string& what) {
  throw error(error_code::protocol, "received tensor: " + what);
}

/// @returns the dtype of `x` after checking that its parts fit together.
c10::ScalarType checked_dtype(const tensor_ref& x) {
  if (x.unplaced)
    throw error{*x.unplaced};
  // In host memory, but of a device that this rank does not have.
  auto where = x.home == device_ref{} ? x.device : x.home;
  auto type = static_cast<c10::DeviceType>(where.type);
  auto known = type == c10::kCPU || c10::impl::hasDeviceGuardImpl(type);
  if (!known || x.home != device_ref{})
    refuse("a tensor on device type " + std::to_string(where.type));
  auto dtype = static_cast<c10::ScalarType>(x.dtype);
  uint64_t bytes = x.dtype < c10::NumScalarTypes ? element_size(dtype)
                                                 : uint64_t{0};
  if (bytes == 0)
    malformed("unknown dtype " + std::to_string(x.dtype));
  bool empty = false;
  for (auto size : x.shape) {
    if (size < 0)
      malformed("negative size " + std::to_string(size));
    empty = empty || size == 0;
    // Also for empty tensors: strides are computed from these numbers.
    auto n = static_cast<uint64_t>(std::max<int64_t>(size, 1));
    if (__builtin_mul_overflow(bytes, n, &bytes) || bytes > INT64_MAX)
      malformed("its size overflows");
  }
  if (empty)
    bytes = 0;
  if (bytes != x.nbytes)
    malformed(std::to_string(x.nbytes) + " bytes, but its shape needs "
              + std::to_string(bytes));
  if (!x.strides.empty() && !are_strides(x.strides, x.shape))
    malformed("its strides do not fit its shape");
  if (bytes > 0 && x.data == nullptr)
    malformed("it has no data");
  return dtype;
}

} // namespace

std::string refusal_of(const at::Tensor& x) {
  if (is_absent(x)) // its owner can send it, and access would wait
    return {};
  auto what = unsendable(x);
  return what.empty() ? what : what + " cannot be sent to another rank";
}

std::optional<uint64_t> hash_bits(const at::Tensor& x) {
  if (!refusal_of(x).empty())
    return std::nullopt;
  auto flat = x.detach().to(c10::kCPU).contiguous();
  auto* bytes = static_cast<const std::byte*>(flat.const_data_ptr());
  return hash_of_memory({bytes, flat.nbytes()});
}

std::vector<int64_t> dense_strides(const at::Tensor& x) {
  auto result = at::infer_dense_strides(x.sizes(), x.strides());
  auto row_major = c10::contiguous_strides(x.sizes());
  if (std::equal(result.begin(), result.end(), row_major.begin(),
                 row_major.end()))
    result.clear();
  return result;
}

at::Device device_here(const tensor_meta& x) {
  auto mine = rank_context::current_device();
  auto type = static_cast<c10::DeviceType>(x.device.type);
  if (type == c10::kCPU || SMP_FAULT("promise-on-host"))
    return c10::kCPU;
  if (type != mine.type())
    refuse("a tensor on device type " + std::to_string(x.device.type));
  return mine;
}

tensor_ref to_tensor_ref(const at::Tensor& x, bool snapshot) {
  if (auto what = unsendable(x); !what.empty())
    refuse(what);
  auto dense = without_gaps(x, snapshot);
  tensor_ref result;
  result.nbytes = dense.nbytes();
  // Const: this must not copy a lazily cloned (copy-on-write) tensor.
  result.data = result.nbytes > 0 ? dense.const_data_ptr() : nullptr;
  result.dtype = static_cast<uint8_t>(dense.scalar_type());
  result.device = {static_cast<uint8_t>(dense.device().type()),
                   dense.device().index()};
  result.shape = dense.sizes().vec();
  result.strides = dense_strides(dense);
  // The storage alone: the tensor would also keep its autograd graph.
  result.owner = std::make_shared<c10::Storage>(dense.storage());
  if (!dense.device().is_cpu())
    result.ready = rank_context::current()->launches()->point();
  return result;
}

at::Tensor to_tensor(const tensor_ref& x) {
  auto dtype = checked_dtype(x);
  auto strides = x.strides.empty()
                   ? c10::contiguous_strides(x.shape)
                   : c10::DimVector(x.strides.begin(), x.strides.end());
  // Kernels may fault on a misaligned element.
  auto address = reinterpret_cast<uintptr_t>(x.data);
  auto device = c10::Device{static_cast<c10::DeviceType>(x.device.type),
                            static_cast<c10::DeviceIndex>(x.device.index)};
  if (device.is_cpu() && x.nbytes > 0 && address % element_size(dtype) != 0) {
    auto result = at::Tensor{
      at::detail::empty_strided_cpu(x.shape, strides, dtype)};
    std::memcpy(result.mutable_data_ptr(), x.data, x.nbytes);
    return result;
  }
  // One of this rank: what arrives from others is there.
  if (x.ready)
    static_cast<const device_point&>(*x.ready).block(
      c10::impl::VirtualGuardImpl{device.type()}.getStream(device));
  using owner_ptr = std::shared_ptr<const void>;
  auto drop = [](void* ptr) { delete static_cast<owner_ptr*>(ptr); };
  return at::for_blob(const_cast<void*>(x.data), x.shape)
    .strides(strides)
    .context(new owner_ptr(x.owner), drop)
    .options(at::TensorOptions{dtype}.device(device))
    .target_device(device)
    .make_tensor();
}

} // namespace smp
