#pragma once

#include <ATen/core/Tensor.h>

namespace smp::nn {

// For code that does something with gradients or values of parameters itself,
// and has to know what they are (paper, appendix on custom distributed
// modules). Both are false before the partition, and for what this rank does
// not own.

/// Tells whether this rank holds a slice of the parameter, and the ranks with
/// which it shares the module the other ones.
bool is_distributed_parameter(const at::Tensor& x);

/// Tells whether a step makes the gradient of the slice for the samples of all
/// ranks that share it: as many batches as they are, by which it is divided
/// when replicas average it. Of what is whole a rank has that of its own batch.
bool is_scaled_batch_parameter(const at::Tensor& x);

} // namespace smp::nn
