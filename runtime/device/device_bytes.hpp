#pragma once

#include <ATen/ops/from_blob.h>
#include <c10/core/Device.h>

#include <cstdint>

namespace smp {

/// @returns bytes that are there as a tensor, to be copied by LibTorch; who
/// copies keeps them
inline at::Tensor bytes_at(const void* x, uint64_t size, c10::Device where) {
  return at::for_blob(const_cast<void*>(x), {static_cast<int64_t>(size)})
    .options(at::TensorOptions{at::kByte}.device(where))
    .target_device(where)
    .make_tensor();
}

} // namespace smp
