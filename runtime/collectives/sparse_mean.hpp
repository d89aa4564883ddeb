#pragma once

#include "partition/rank_layout.hpp"

#include <ATen/core/Tensor.h>

namespace smp {

class rank_context;

/// The mean of gradients of which some ranks have only a few rows. Collective
/// over the group.
/// @param gradient sparse, dense or undefined, which counts as zero
/// @param sizes of the parameter
/// @returns a sparse tensor with the rows that any rank has
at::Tensor mean_of_sparse(const rank_context& rank, const comm_group& over,
                          const at::Tensor& gradient, at::IntArrayRef sizes);

} // namespace smp
