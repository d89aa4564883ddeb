#pragma once

#include "tests/simulated/driver/races.hpp"

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <functional>
#include <utility>
#include <vector>

namespace smp::sim {

/// Whether it is defined and on one of our devices.
bool is_ours(const at::Tensor&);

/// The bytes that a tensor may reach, in device addresses.
access touching(const at::Tensor&, bool write);

/// CPU tensors with the bytes of device tensors, for kernels only. Tensors that
/// share memory keep sharing it: operators look at that. They hold no device
/// memory alive, as kernels do not.
class twins {
public:
  at::Tensor operator()(const at::Tensor&);

private:
  c10::Storage storage_of(const at::Tensor&);

  std::vector<std::pair<c10::StorageImpl*, c10::Storage>> storages_;
};

/// Of a tensor that nothing else in the kernel shares memory with.
at::Tensor twin(const at::Tensor&);

/// The current one, of the tensor's device.
c10::Stream stream_for(const at::Tensor&);

/// Runs a kernel later, on the current stream of the tensor's device.
void queue(const at::Tensor& on, const char* name, std::function<void()> kernel,
           const std::vector<access>& accesses);

/// The host waits for the current stream of the tensor's device.
void wait_current(const at::Tensor& on, const char* reason);

} // namespace smp::sim
