#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace smp {

/// How full an arena is, in bytes.
struct arena_status {
  uint64_t capacity = 0;
  /// In blocks that are taken, and what was asked for of that: blocks are
  /// powers of two.
  uint64_t used = 0;
  uint64_t wanted = 0;
  /// The most that was ever used.
  uint64_t high_water = 0;
  uint64_t largest_free = 0;
  uint64_t blocks = 0;
  /// How often there was no block that fits.
  uint64_t refused = 0;

  /// @returns how much of what is free lies outside of the largest block that
  /// is: 0 none, towards 1 nearly all.
  double fragmentation() const noexcept {
    auto free = capacity - used;
    return free == 0 ? 0
                     : 1
                         - static_cast<double>(largest_free)
                             / static_cast<double>(free);
  }
};

/// Memory in which tensors cross between ranks. To make memory known to a
/// network or to another process is expensive, and so is its first touch; so an
/// arena is made once, at the start of a run, and dealt out in blocks. It never
/// grows: where no block is free, the caller takes another way. Thread-safe;
/// its blocks may outlive it.
class arena {
public:
  /// The smallest block, and what all blocks are aligned to, in bytes.
  static constexpr uint64_t alignment = 4096;

  /// Takes shared memory and touches all of it.
  /// @throws error (transport) if there is none
  explicit arena(uint64_t capacity);

  /// @returns a block of at least `size` bytes, which comes back with its last
  /// owner, or null: there is none.
  std::shared_ptr<std::byte> take(uint64_t size);

  /// @returns whether `x` lies in this arena.
  bool contains(const void* x) const noexcept;

  /// @returns all of its memory, `status().capacity` bytes, kept alive.
  std::shared_ptr<std::byte> memory() const;

  arena_status status() const;

private:
  struct store;
  std::shared_ptr<store> store_;
};

} // namespace smp
