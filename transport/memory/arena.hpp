#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace smp {

/// How full an arena is, in bytes.
struct arena_status {
  uint64_t capacity = 0;
  /// Bytes of the blocks in use, and the part of them that was asked for: block
  /// sizes are powers of two.
  uint64_t used = 0;
  uint64_t wanted = 0;
  /// The largest value that `used` ever had.
  uint64_t high_water = 0;
  uint64_t largest_free = 0;
  uint64_t blocks = 0;
  /// How often `take` found no block large enough.
  uint64_t refused = 0;

  /// @returns the share of the free bytes that lies outside the largest free
  /// block: 0 if none does, close to 1 if nearly all do.
  double fragmentation() const noexcept {
    auto free = capacity - used;
    return free == 0 ? 0
                     : 1
                         - static_cast<double>(largest_free)
                             / static_cast<double>(free);
  }
};

/// Memory through which tensors travel between ranks. Registering memory with a
/// network or another process is expensive, and so is its first touch; so an
/// arena is allocated once, at the start of a run, and handed out in blocks. It
/// never grows: if no block is free, the caller takes another path.
/// Thread-safe; its blocks may outlive it.
class arena {
public:
  /// The smallest block, and what all blocks are aligned to, in bytes.
  static constexpr uint64_t alignment = 4096;

  /// Allocates shared memory and touches all of it.
  /// @throws error (transport) if there is none
  explicit arena(uint64_t capacity);

  /// Of memory that is there, as on a device; nothing here touches it.
  /// @param memory of at least that many bytes; blocks keep it alive
  arena(std::shared_ptr<std::byte> memory, uint64_t capacity);

  /// @returns a block of at least `size` bytes, which its last owner returns to
  /// the arena, or null if no block is free.
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
