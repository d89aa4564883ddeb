#pragma once

#include "runtime/config/config_file.hpp"
#include "transport/error.hpp"

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace smp {

struct walked_model;

/// Memory that training takes on one rank whatever the batch, in bytes.
struct memory_need {
  uint64_t parameters = 0; // and buffers
  uint64_t gradients = 0;  // after a step
  /// State of the optimizer, including its own weights and averages.
  uint64_t optimizer = 0;
  /// Gradients and updates in flight between replicas, at most.
  uint64_t buckets = 0;
  /// float32 gradients of half-precision parameters, during the update.
  uint64_t updates = 0;
  /// For tensors that take the device path.
  uint64_t arenas = 0;
  /// Beside the sum, what a rank on a device has in host memory; and the part
  /// of the sum that `smp.offload_optimizer` would take there.
  uint64_t on_host = 0;
  uint64_t could_leave = 0;

  uint64_t sum() const noexcept {
    return parameters + gradients + optimizer + buckets + updates + arenas;
  }
};

template <class Inspector>
bool inspect(Inspector& f, memory_need& x) {
  return f.object(x).fields(
    f.field("parameters", x.parameters), f.field("gradients", x.gradients),
    f.field("optimizer", x.optimizer), f.field("buckets", x.buckets),
    f.field("updates", x.updates), f.field("arenas", x.arenas),
    f.field("on_host", x.on_host), f.field("could_leave", x.could_leave));
}

/// The part of a tensor that a rank holds.
struct held_part {
  uint64_t bytes = 0;
  /// Tensor-parallel ranks hold other slices of it.
  bool is_slice = false;
};

/// @param held takes a position in `model.tensors`
/// @param on_device whether the rank computes on a device
memory_need need_of(const walked_model& model, const train_config& x,
                    const std::function<held_part(uint32_t)>& held,
                    bool on_device = false);

/// Adds to a lack of memory how much the rank needs in any case: "603 MB for
/// parameters, gradients and the state of sgd; activations come on top"; and
/// which key would help.
void explain_need(failure& why, const memory_need& x,
                  const optimizer_config& optimizer);

/// @param activations of each device in bytes, nothing where unknown; if empty,
/// the table has no such column
/// @returns a table with a line for each device
std::string
needs_table(const std::vector<memory_need>& xs,
            const optimizer_config& optimizer,
            const std::vector<std::optional<uint64_t>>& activations = {});

/// @returns the current exception, if it says that there is no more memory
/// @pre inside of a handler
std::optional<failure> lack_of_memory();

} // namespace smp
