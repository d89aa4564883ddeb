#include "transport/memory/arena.hpp"

#include "transport/error.hpp"
#include "transport/memory/buddy_allocator.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <mutex>
#include <string>

namespace smp {

namespace {

std::shared_ptr<std::byte> shared_with_network(uint64_t bytes) {
  if (bytes == 0)
    return nullptr;
  // Populated, as the first touch of a page costs more than copying it.
  auto x = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                  MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  if (x == MAP_FAILED)
    throw error{error_code::transport, "no memory for an arena of "
                                         + std::to_string(bytes) + " bytes"};
  return {static_cast<std::byte*>(x),
          [bytes](std::byte* y) { ::munmap(y, bytes); }};
}

} // namespace

struct arena::store {
  explicit store(uint64_t capacity) : blocks(capacity, alignment) {
    owner = shared_with_network(blocks.capacity());
    memory = owner.get();
  }

  store(std::shared_ptr<std::byte> x, uint64_t capacity)
    : blocks(capacity, alignment), owner(std::move(x)), memory(owner.get()) {
    // nop
  }

  mutable std::mutex mutex;
  buddy_allocator blocks;  // guarded by mutex
  uint64_t high_water = 0; // guarded by mutex
  uint64_t refused = 0;    // guarded by mutex
  std::shared_ptr<std::byte> owner;
  std::byte* memory = nullptr;
};

arena::arena(uint64_t capacity) : store_(std::make_shared<store>(capacity)) {
  // nop
}

arena::arena(std::shared_ptr<std::byte> memory, uint64_t capacity)
  : store_(std::make_shared<store>(std::move(memory), capacity)) {
  // nop
}

std::shared_ptr<std::byte> arena::take(uint64_t size) {
  auto& s = *store_;
  std::lock_guard guard{s.mutex};
  auto offset = s.blocks.allocate(size);
  if (!offset) {
    ++s.refused;
    return nullptr;
  }
  s.high_water = std::max(s.high_water, s.blocks.used());
  return {s.memory + *offset, [owner = store_](std::byte* x) {
            std::lock_guard guard{owner->mutex};
            owner->blocks.release(static_cast<uint64_t>(x - owner->memory));
          }};
}

bool arena::contains(const void* x) const noexcept {
  auto at = reinterpret_cast<uintptr_t>(x);
  auto begin = reinterpret_cast<uintptr_t>(store_->memory);
  return at >= begin && at - begin < store_->blocks.capacity();
}

std::shared_ptr<std::byte> arena::memory() const {
  return {store_, store_->memory};
}

arena_status arena::status() const {
  auto& s = *store_;
  std::lock_guard guard{s.mutex};
  return {
    s.blocks.capacity(),     s.blocks.used(),  s.blocks.wanted(), s.high_water,
    s.blocks.largest_free(), s.blocks.parts(), s.refused};
}

} // namespace smp
