#pragma once

#include <cstddef>
#include <cstdint>

// A device address is reserved address space that is never accessible; kernels
// reach the bytes through a second mapping at a fixed distance. Host code that
// touches device memory faults, at any time, whether or not a kernel runs.

namespace smp::sim {

// -- whole segments -----------------------------------------------------------

/// Memory of its own, as cudaMalloc gives.
/// @returns nullptr if the device is full
void* raw_allocate(int device, size_t bytes);

/// Waits for the device, as cudaFree does.
void raw_free(void*);

/// -1: not device memory.
int device_of(const void*);

/// @throws std::runtime_error if it is not device memory
void* kernel_view_of(const void*);

/// Where a kernel finds a device address.
template <class T>
T* kernel_view(T* address) {
  return static_cast<T*>(kernel_view_of(address));
}

// -- the caching allocator ----------------------------------------------------
// Ordered by stream, as those of GPU backends: a freed block may be used again
// at once on the stream that it was allocated on.

/// @returns nullptr if the device is full
void* allocate(int device, int64_t stream, size_t bytes);

void free(void*);

/// Another stream uses the block as well: once freed, it is not used again
/// before what that stream has been given until then (recordStream).
void use_on(void*, int device, int64_t stream);

/// Gives whole free segments back to the device, which it waits for.
void empty_cache(int device);

struct memory_info {
  size_t free, total;
  /// Bytes of blocks in use, and the most since the peak was last reset.
  size_t allocated, peak;
};

memory_info memory(int device);

void reset_peak(int device);

// -- for other processes of the same user -------------------------------------

/// Plain bytes.
struct memory_handle {
  int32_t process;
  int32_t file;
  uint64_t size;
  uint64_t offset;
};

memory_handle export_memory(const void* inside_a_segment);

/// The exporting process must still live, and be another one, as with CUDA.
void* import_memory(int device, const memory_handle&);

/// Of what was imported.
void close_memory(void*);

} // namespace smp::sim
