#pragma once

#include <ATen/core/Tensor.h>

namespace smp::sim {

/// As CUDA's copies: what is pinned and non_blocking happens when the stream
/// gets there; other sources in host memory are read now; between devices on
/// the stream of the source, ordered with that of the target.
at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to,
                     bool non_blocking);

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to);

/// The host waits.
at::Scalar local_scalar(const at::Tensor&);

} // namespace smp::sim
