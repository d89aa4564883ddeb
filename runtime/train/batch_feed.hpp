#pragma once

#include "runtime/data/data.hpp"
#include "runtime/device/arriving_tensors.hpp"

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <utility>

namespace smp {

/// The batches of training steps, in the order in which a rank takes them. On a
/// device the next one is copied there while a step runs: one that is only
/// copied when it is used makes the device, and where memory is not pinned also
/// the host, wait for that.
class batch_feed {
public:
  /// @param make the batch of a step
  explicit batch_feed(std::function<batch(uint64_t)> make)
    : make_(std::move(make)) {
    // nop
  }

  /// From now on batches go ahead, as long as the device has room for them.
  /// @pre the modules are on the device
  void send_ahead(std::shared_ptr<storage_copies> x) {
    copies_ = std::move(x);
  }

  /// @param last there is no step after it
  /// @returns the batch of `step`, valid until the next call.
  batch take(uint64_t step, bool last);

private:
  struct ahead {
    uint64_t step;
    arriving_tensors tensors;
  };

  std::function<batch(uint64_t)> make_;
  std::shared_ptr<storage_copies> copies_; // null: batches stay on the host
  std::optional<ahead> now_;               // used by the step that runs
  std::optional<ahead> next_;
};

} // namespace smp
