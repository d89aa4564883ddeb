#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <vector>

namespace smp {

/// Allocates parts of a range of bytes and merges free neighbours, both in
/// logarithmic time. Sizes of parts are powers of two, and each part has one
/// buddy with which it forms the next larger one, so no two free parts stay
/// apart that could be one. Always takes the lowest offset that fits. Works on
/// offsets only, not on memory. Not thread-safe.
class buddy_allocator {
public:
  /// @param capacity rounded down to a multiple of `smallest`
  /// @param smallest part that is dealt out, a power of two
  /// @throws error (internal) if `smallest` is not
  buddy_allocator(uint64_t capacity, uint64_t smallest);

  /// @returns where a part of at least `size` bytes begins, at a multiple of
  /// its size rounded up to a power of two; nothing if none is free.
  std::optional<uint64_t> allocate(uint64_t size);

  /// @pre `offset` was allocated and not released since
  /// @throws error (internal) otherwise
  void release(uint64_t offset);

  uint64_t capacity() const noexcept {
    return capacity_;
  }

  /// @returns the bytes of all parts that are taken.
  uint64_t used() const noexcept {
    return used_;
  }

  /// @returns the bytes that were asked for in them.
  uint64_t wanted() const noexcept {
    return wanted_;
  }

  /// @returns how many parts are taken.
  uint64_t parts() const noexcept {
    return taken_.size();
  }

  /// @returns the size of the largest part that is free, in bytes; 0: none.
  uint64_t largest_free() const noexcept;

private:
  struct part {
    unsigned order;
    uint64_t wanted;
  };

  /// Parts of order k have `smallest_` * 2^k bytes.
  uint64_t size_of(unsigned order) const noexcept {
    return smallest_ << order;
  }

  uint64_t smallest_;
  uint64_t capacity_;
  uint64_t used_ = 0;
  uint64_t wanted_ = 0;
  std::vector<std::set<uint64_t>> free_; // by order
  std::map<uint64_t, part> taken_;       // by offset
};

} // namespace smp
