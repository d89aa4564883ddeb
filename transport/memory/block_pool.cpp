#include "transport/memory/block_pool.hpp"

#include <algorithm>
#include <bit>
#include <map>
#include <mutex>
#include <new>

namespace smp {

namespace {

constexpr auto align = std::align_val_t{block_pool::alignment};

/// Rounds up to one of four sizes per power of two: a block fits the next
/// tensor of about the same size and wastes at most a quarter.
uint64_t size_class(uint64_t size) {
  if (size <= 4 * block_pool::alignment)
    return std::max<uint64_t>(size + block_pool::alignment - 1, 1)
           / block_pool::alignment * block_pool::alignment;
  auto step = std::bit_floor(size) / 4;
  return (size + step - 1) / step * step;
}

} // namespace

struct block_pool::store {
  explicit store(uint64_t limit) : keep_limit(limit) {
    // nop
  }

  ~store() {
    for (auto& [size, block] : blocks)
      ::operator delete(block, align);
  }

  void give_back(std::byte* block, uint64_t size) noexcept {
    try {
      std::lock_guard guard{mutex};
      if (kept + size <= keep_limit) {
        // The block used last is given out first: caches may still have it.
        blocks.emplace_hint(blocks.lower_bound(size), size, block);
        kept += size;
        return;
      }
    } catch (...) {
      // No memory for the entry: free the block instead.
    }
    ::operator delete(block, align);
  }

  std::byte* find(uint64_t size) {
    std::lock_guard guard{mutex};
    auto i = blocks.find(size);
    if (i == blocks.end())
      return nullptr;
    auto result = i->second;
    blocks.erase(i);
    kept -= size;
    return result;
  }

  const uint64_t keep_limit;
  mutable std::mutex mutex;
  std::multimap<uint64_t, std::byte*> blocks;
  uint64_t kept = 0;
};

block_pool::block_pool(uint64_t keep_limit)
  : store_(std::make_shared<store>(keep_limit)) {
  // nop
}

block_pool::~block_pool() = default;

std::shared_ptr<std::byte> block_pool::take(uint64_t size) {
  if (size > PTRDIFF_MAX / 2)
    throw std::bad_alloc{};
  auto rounded = size_class(std::max<uint64_t>(size, 1));
  auto block = store_->find(rounded);
  if (block == nullptr)
    block = static_cast<std::byte*>(::operator new(rounded, align));
  return {block,
          [s = store_, rounded](std::byte* x) { s->give_back(x, rounded); }};
}

uint64_t block_pool::kept() const {
  std::lock_guard guard{store_->mutex};
  return store_->kept;
}

} // namespace smp
