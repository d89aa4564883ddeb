#pragma once

#include "runtime/device/rank_device.hpp"
#include "transport/device_ops.hpp"

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

namespace smp {

/// Copies between a device and host memory, each direction on a lane of its
/// own, so that they run beside the kernels; sums of collectives have one, too.
/// Memory of the device is allocated for the lane, not for the kernels: a copy
/// then need not wait for those that were launched before. It is not used for
/// anything else before the kernels that were launched until its end have run.
class device_copies final : public device_ops {
public:
  /// @param compute the stream of those that read what was copied in
  device_copies(std::shared_ptr<accelerator> kind, c10::Device device,
                c10::Stream compute, const device_lane& out,
                const device_lane& in, const device_lane& sums);

  bool failed() const override {
    return failure_of(out_.watch).has_value();
  }

  /// At most a sixteenth of the device.
  shared_memory share(uint64_t size) override;

  shared_memory open(const std::string& handle) override;

  std::optional<device_ref> here(device_ref x) const override;

  std::shared_ptr<std::byte> allocate(device_ref where, uint64_t size) override;

  tensor_ref copy(const tensor_ref& from, std::shared_ptr<std::byte> to,
                  device_ref where) override;

  std::shared_ptr<std::byte> allocate_sum(uint64_t size) override;

  std::shared_ptr<device_event>
  combine(const combination& x, std::byte* to,
          std::span<const void* const> inputs,
          const std::shared_ptr<device_event>& after) override;

  /// From here on `x` waits for the sums that were begun.
  void order_sums_before(c10::Stream x) const;

private:
  /// The lane of a copy to `to`.
  const device_lane& lane_to(const std::byte* to, device_ref where) const;

  std::shared_ptr<accelerator> kind_;
  c10::Device device_;
  c10::Stream compute_;
  device_lane out_;
  device_lane in_;
  device_lane sums_;
  std::shared_ptr<device_watch> watch_;
  /// What this rank shares; its owner keeps it.
  std::atomic<const std::byte*> shared_ = nullptr;
  std::atomic<uint64_t> shared_size_ = 0;
};

} // namespace smp
