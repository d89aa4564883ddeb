#pragma once

// As with CUDA, a kernel that does something forbidden ends all use of the
// device by this process, and who uses it next is told, whatever that is.

namespace smp::sim {

/// For kernels: from now on the device has failed. What is queued there is
/// dropped, but for events.
void fail_device(int device);

bool has_failed(int device);

/// For tests that go on: devices are as new. @pre they are idle
void repair_devices();

} // namespace smp::sim
