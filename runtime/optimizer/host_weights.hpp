#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <c10/util/intrusive_ptr.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace torch::optim {
class Optimizer;
} // namespace torch::optim

namespace smp {

class device_point;
class storage_copies;

/// An optimizer's state takes as much memory as the parameters, or twice that,
/// and is used once per step (`smp.offload_optimizer`, Ren et al. 2021). These
/// are copies of a device's parameters in pinned host memory, which the
/// optimizer updates in place of them: so its state is on the host, and so are
/// the numbers of the update. Gradients come and values go in batches, beside
/// the kernels; the host waits for the gradients only.
/// Single-threaded, on a thread that launches on the device of the rank.
class host_weights {
public:
  host_weights() = default;

  host_weights(const host_weights&) = delete;
  host_weights& operator=(const host_weights&) = delete;

  /// Replaces the parameters in the groups of `x` that are on the device of
  /// `copies`; the state that the optimizer already has goes along.
  /// @throws c10::Error if there is not so much pinned memory
  void replace(torch::optim::Optimizer& x,
               std::shared_ptr<const storage_copies> copies);

  /// Takes over the value of each parameter that was changed since the last
  /// `note_values`, for which the host waits.
  void follow_parameters();

  /// The same, and brings the gradients of the parameters, which keep theirs.
  /// @throws c10::AcceleratorError if the device has failed
  void begin_update();

  /// Drops the gradients here and, after an update, sends what had one.
  void end_update(bool updated);

  /// Sends all values.
  void send_all();

  /// Returns when what was sent has left, so that it may be changed.
  /// @throws c10::AcceleratorError if the device has failed
  void await_sent();

  /// Marks the end of all parameter changes of an update.
  void note_values();

  /// Drops the gradients of the parameters.
  void zero_grad();

  /// @returns the copy of a parameter, or `x` itself
  at::Tensor host_of(const at::Tensor& x) const;

  /// @returns the parameter of a copy, or `x` itself
  at::Tensor parameter_of(const at::Tensor& x) const;

  bool empty() const noexcept {
    return entries_.empty();
  }

private:
  struct entry {
    at::Tensor parameter;
    at::Tensor host;
    /// The parameter's version and storage when both had the same value. (No
    /// new storage has the address of one of which a weak pointer is left.)
    uint64_t version;
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  };

  /// Copies of parameters of one type, back to back.
  struct block {
    c10::Storage memory;
    uint64_t bytes = 0;
    std::vector<size_t> entries;
  };

  void make_blocks();
  std::shared_ptr<device_point> fetch_gradients();
  void send(const block& x, const std::vector<entry*>& changed);

  std::shared_ptr<const storage_copies> copies_;
  std::vector<entry> entries_; // in the order of the optimizer
  std::vector<block> blocks_;
  /// When the last values that were sent have left; null: they have.
  std::shared_ptr<device_point> sent_;
};

} // namespace smp
