#pragma once

#include "transport/device_ops.hpp"
#include "transport/fabric.hpp"
#include "transport/memory/arena.hpp"

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace smp {

/// D2D ALLOCATOR: memory through which tensors get from the device of one rank
/// to that of another rank of the machine. The sender copies a tensor into a
/// block of its own arena and lends it; the message only says where. The
/// receiver, whose device can read there, copies it out and returns the block.
/// Thread-safe, once the others' arenas are open.
class device_arenas {
public:
  /// Without a device, or with one that shares no memory, there is no arena.
  /// @param size of the own arena, in bytes
  device_arenas(std::shared_ptr<device_ops> devices, uint64_t size);

  // -- at the start -----------------------------------------------------------

  /// @returns what other ranks of this machine need to `open` the own arena;
  /// empty: there is none
  const std::string& handle() const noexcept {
    return own_.handle;
  }

  /// Opens the arenas of other ranks.
  /// @param handles by rank; empty: it has none, or is no such rank
  /// @returns which of them the device of this rank can read
  std::vector<bool> open(const std::vector<std::string>& handles);

  // -- this rank sends --------------------------------------------------------

  /// @returns whether there is an own arena
  explicit operator bool() const noexcept {
    return blocks_.has_value();
  }

  /// @returns a block of at least `size` bytes, or null if none is free
  std::shared_ptr<std::byte> take(uint64_t size) {
    return blocks_->take(size);
  }

  /// @returns where the own arena is
  device_ref place() const noexcept {
    return own_.device;
  }

  /// Makes of a tensor in a block of the arena one that says where it is. The
  /// block is taken until `to` returns it.
  void lend(rank_id to, tensor_ref& x);

  /// @param x of kind `returned`
  /// @throws error (protocol) if `by` was not lent that
  void take_back(rank_id by, const message& x);

  /// `x` returns nothing any more.
  void lost(rank_id x);

  // -- this rank receives -----------------------------------------------------

  struct borrowed {
    /// As the device of this rank can read it.
    tensor_ref tensor;
    /// To be returned once it was read.
    uint64_t number = 0;
  };

  /// @param x was lent by `from`
  /// @throws error (protocol) if it says what cannot be
  borrowed find(rank_id from, const tensor_ref& x) const;

  /// @returns what tells the owner that these blocks were read
  static message give_back(const std::vector<uint64_t>& numbers);

  arena_status status() const {
    return blocks_->status();
  }

private:
  using block = std::shared_ptr<const void>;

  const std::shared_ptr<device_ops> devices_;
  const shared_memory own_;
  std::optional<arena> blocks_;
  std::vector<shared_memory> others_; // by rank
  std::mutex mutex_;
  uint64_t next_ = 1;                                  // guarded by mutex_
  std::map<std::pair<rank_id, uint64_t>, block> lent_; // guarded by mutex_
};

} // namespace smp
