#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/edge.h>

#include <cstdint>
#include <vector>

namespace smp {

/// A promised gradient is there before its backward ran, so it must be known
/// which ones there will be: an argument that no gradient reaches has none, and
/// not zeros, as in one process (R40).
/// @param outputs where gradients enter the graph
/// @param leaves arguments where they come out; undefined: nowhere
/// @returns by output, positions in `leaves`
std::vector<std::vector<uint32_t>>
reached_arguments(const std::vector<torch::autograd::Edge>& outputs,
                  const std::vector<at::Tensor>& leaves);

} // namespace smp
