#pragma once

#include <cstdint>
#include <map>
#include <optional>

namespace smp {

/// Allocates parts of a file. Adjacent free parts are merged, and the smallest
/// one that is large enough is taken. So where the same sizes come and go, the
/// file stops growing.
class file_slots {
public:
  /// Slots begin at multiples of this and take multiples of it.
  static constexpr uint64_t granule = 4096;

  struct slot {
    uint64_t offset = 0;
    uint64_t bytes = 0;

    bool operator==(const slot&) const = default;
  };

  /// @returns nothing if no free part has `bytes`
  std::optional<slot> take(uint64_t bytes);

  void give_back(slot freed);

  /// @returns by how much the file has to grow before `bytes` can be taken, a
  /// multiple of `granule`
  uint64_t missing(uint64_t bytes) const;

  /// The file became longer by `bytes`, a multiple of `granule`.
  void grow(uint64_t bytes);

  /// Length of the file.
  uint64_t size() const noexcept {
    return size_;
  }

  uint64_t in_use() const noexcept {
    return in_use_;
  }

private:
  std::map<uint64_t, uint64_t> free_; // bytes by offset
  uint64_t size_ = 0;
  uint64_t in_use_ = 0;
};

} // namespace smp
