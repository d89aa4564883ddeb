#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Device.h>

#include <cstdint>

namespace smp::sim {

/// Random numbers of a device, as CUDA's generators: a seed, and an offset that
/// each kernel which draws moves on. Kernels do not draw from it: at launch
/// each gets an engine of its own, so that numbers depend on the order of
/// launches, not on when kernels run.
class sim_generator final : public c10::GeneratorImpl {
public:
  explicit sim_generator(c10::DeviceIndex);

  static c10::DeviceType device_type();

  /// Also sets the offset to 0.
  void set_current_seed(uint64_t) override;

  /// @throws c10::Error if it is no multiple of 4
  void set_offset(uint64_t) override;

  uint64_t get_offset() const override;

  uint64_t current_seed() const override;

  uint64_t seed() override;

  /// Seed and offset, 16 bytes.
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override;

  void set_state(const c10::TensorImpl&) override;

  /// For the next kernel.
  uint64_t next_seed();

private:
  sim_generator* clone_impl() const override;

  uint64_t seed_ = c10::default_rng_seed_val;
  uint64_t offset_ = 0;
};

/// @param device -1 for the current one
const at::Generator& default_generator(c10::DeviceIndex device);

at::Generator new_generator(c10::DeviceIndex device);

} // namespace smp::sim
