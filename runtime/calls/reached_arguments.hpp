#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/edge.h>

#include <cstdint>
#include <vector>

namespace smp {

/// A promised gradient exists before its backward has run, so the arguments
/// that get one must be known in advance: those that no gradient reaches have
/// none, not zeros, as in one process (R40).
/// @param outputs where gradients enter the graph
/// @param leaves arguments where they come out; undefined: nowhere
/// @returns by output, positions in `leaves`
std::vector<std::vector<uint32_t>>
reached_arguments(const std::vector<torch::autograd::Edge>& outputs,
                  const std::vector<at::Tensor>& leaves);

} // namespace smp
