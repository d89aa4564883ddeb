#pragma once

#include "tests/simulated/driver/races.hpp"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

// A stream runs what it is given in order, on a thread of its own. Stream 0 of
// each device is its default stream; all streams are independent.

namespace smp::sim {

/// Of the calling thread; 0 at first.
int current_device();

/// @throws std::runtime_error if there is no such device
/// @returns the one before
int exchange_device(int device);

/// Of the calling thread; the default stream at first.
int64_t current_stream(int device);

/// @returns the one before
int64_t exchange_stream(int device, int64_t stream);

int64_t new_stream(int device);

/// One of a few, in turn.
int64_t pooled_stream(int device);

/// Whether a stream of the device has been asked for: the device is no longer
/// untouched by this process.
bool device_used(int device);

/// Runs `kernel` later, when the stream gets there. What it throws shows at the
/// next wait for the stream.
/// @param name outlives the process, as literals do
void launch(int device, int64_t stream, const char* name,
            std::function<void()> kernel,
            const std::vector<access>& accesses = {});

/// Calls `function` on the stream's thread when the stream gets there. As a
/// driver's host function it must not use a device, nor free pinned memory that
/// copies have used or an event: if it does, the next wait for the stream
/// fails. Whoever it tells is ordered after what the stream had done.
void notify(int device, int64_t stream, std::function<void()> function);

bool stream_idle(int device, int64_t stream);

/// @param reason as host_waits() shall say it
/// @throws std::runtime_error with the text of a kernel that has failed
void wait_stream(int device, int64_t stream, const char* reason = "stream");

/// All streams of the device.
/// @throws std::runtime_error with the text of a kernel that has failed
void wait_device(int device, const char* reason = "device");

/// Of all devices, so far.
uint64_t kernels_run();

/// The largest number of kernels that were launched on the stream and not
/// finished, since the process began or it was last reset.
size_t most_queued(int device, int64_t stream);

void reset_most_queued(int device, int64_t stream);

} // namespace smp::sim
