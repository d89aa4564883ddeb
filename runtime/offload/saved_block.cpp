#include "runtime/offload/saved_block.hpp"

#include <c10/core/CPUAllocator.h>

#include <utility>

namespace smp {

namespace {

/// Of addresses, for vector instructions.
constexpr uint64_t alignment = 64;

} // namespace

std::shared_ptr<saved_block> saved_block::make(const c10::Storage& from,
                                               uint64_t offset, uint64_t bytes,
                                               const storage_copies* device,
                                               std::shared_ptr<doorbell> bell) {
  auto result = std::make_shared<saved_block>();
  result->bytes = bytes;
  auto* begin = static_cast<const char*>(from.data()) + offset;
  result->misalignment = reinterpret_cast<uintptr_t>(begin) % alignment;
  result->on_device = !from.device().is_cpu();
  if (!result->on_device) {
    result->memory = from;
    result->offset = offset;
    return result;
  }
  auto sent = device->to_host(from, offset, bytes);
  result->memory = std::move(sent.copy);
  result->ready = std::move(sent.done);
  result->from = std::move(sent.from);
  result->copied = std::make_shared<bool>(false);
  result->ready->then([bell = std::move(bell), copied = result->copied] {
    {
      std::lock_guard guard{bell->mutex};
      *copied = true;
    }
    bell->work.notify_one();
  });
  return result;
}

c10::Storage saved_block::room(const storage_copies* device) const {
  if (on_device)
    return device->pinned(bytes);
  return {c10::Storage::use_byte_size_t{},
          static_cast<int64_t>(misalignment + bytes), c10::GetCPUAllocator(),
          true};
}

} // namespace smp
