#pragma once

#include "runtime/execution/running_call.hpp"

#include <torch/nn/modules/container/sequential.h>

#include <optional>
#include <utility>

namespace smp::nn {

/// Runs layers one after the other. Ranks that share them for memory exchange
/// nothing between two layers, as no other code sees the hidden states there.
/// @returns the result of the last layer, an R
template <class R, class X>
R run_in_row(torch::nn::Sequential& layers, X&& x) {
  std::optional<running_call::row_scope> row;
  if (auto* ex = running_call::current())
    row.emplace(*ex, layers.get());
  return layers->forward<R>(std::forward<X>(x));
}

} // namespace smp::nn
