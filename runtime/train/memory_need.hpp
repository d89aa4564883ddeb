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

/// @param bytes_of what the rank has of a tensor, by position in
/// `model.tensors`; 0: it has nothing of it
memory_need need_of(const walked_model& model, const train_config& x,
                    const std::function<uint64_t(uint32_t)>& bytes_of);

/// @returns "603 MB for parameters, gradients and the state of sgd, activations
/// come on top"
std::string describe(const memory_need& x, const optimizer_config& optimizer);

} // namespace smp
