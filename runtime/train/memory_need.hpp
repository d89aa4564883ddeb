#pragma once

#include "runtime/config/config_file.hpp"
#include "runtime/model/module_walk.hpp"

#include <cstdint>
#include <functional>
#include <string>

namespace smp {

/// What training takes on one rank whatever the batch, in bytes.
struct memory_need {
  uint64_t parameters = 0; // and buffers
  uint64_t gradients = 0;
  /// What the optimizer keeps, with weights and averages of its own.
  uint64_t optimizer = 0;

  uint64_t sum() const noexcept {
    return parameters + gradients + optimizer;
  }
};

/// What a rank has of a tensor.
struct held_part {
  uint64_t bytes = 0;
  /// Tensor-parallel ranks hold other slices of it.
  bool is_slice = false;
};

/// @param held takes a position in `model.tensors`
memory_need need_of(const walked_model& model, const train_config& x,
                    const std::function<held_part(uint32_t)>& held);

/// @returns "603 MB for parameters, gradients and the state of sgd, activations
/// come on top"
std::string describe(const memory_need& x, const optimizer_config& optimizer);

} // namespace smp
