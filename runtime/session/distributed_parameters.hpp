#pragma once

#include <ATen/core/Tensor.h>

namespace smp::nn {

// For code that processes gradients or values of parameters itself and needs to
// know whether they are distributed (paper, appendix on custom distributed
// modules). Both functions return false before the partition, and for
// parameters that this rank does not own.

/// Tells whether this rank holds a slice of the parameter, and the ranks that
/// share the module with it hold the other slices.
bool is_distributed_parameter(const at::Tensor& x);

/// Tells whether a step computes the slice's gradient over the samples of all
/// ranks that share it: a batch per rank, a factor that averaging over replicas
/// divides out. A whole parameter has the gradient of the rank's own batch.
bool is_scaled_batch_parameter(const at::Tensor& x);

} // namespace smp::nn
