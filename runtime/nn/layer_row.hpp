#pragma once

#include "runtime/remote/execution.hpp"

#include <torch/nn/modules/container/sequential.h>

#include <optional>
#include <utility>

namespace smp::nn {

/// Runs layers one behind the other. Ranks that share them for memory exchange
/// nothing between two of them, as nobody sees the hidden states there.
/// @returns what the last one does, an R
template <class R, class X>
R run_in_row(torch::nn::Sequential& layers, X&& x) {
  std::optional<execution::row_scope> row;
  if (auto* ex = execution::current())
    row.emplace(*ex, layers.get());
  return layers->forward<R>(std::forward<X>(x));
}

} // namespace smp::nn
