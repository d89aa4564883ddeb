#pragma once

#include "transport/fabric.hpp"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace smp {

/// Tensors up to this size, in bytes, travel in the first message: copying them
/// is cheaper than a transfer of their own. The receiver is not asked where to
/// place them.
inline constexpr uint64_t riding_limit = 4096;

/// A tensor whose bytes are about to arrive.
struct arriving_tensor {
  rank_id from;
  /// The name that its sender gave it, never 0.
  uint64_t transfer = 0;
  uint64_t nbytes = 0;
};

/// Chooses where marked tensors are placed on this rank, and is told how the
/// other side placed those of this rank. Called on any thread, with locks of
/// the fabric held: must neither block nor call the fabric.
class tensor_places {
public:
  virtual ~tensor_places() = default;

  /// @returns memory for all of `x`, or null to let the fabric take its own.
  virtual std::shared_ptr<std::byte> place(const arriving_tensor& x) = 0;

  /// All bytes of a tensor that this rank sent have arrived.
  /// @param as_marked whether `place` gave them memory
  virtual void placed(rank_id by, uint64_t transfer, bool as_marked) = 0;
};

/// A fabric that asks the receiver where to place a tensor before its bytes
/// arrive, and tells the sender the outcome: the question travels with the
/// first message and the answer with the end of the transfer, so that neither
/// costs a round trip, and all of a tensor takes the path that was chosen once.
class placing_fabric {
public:
  virtual ~placing_fabric() = default;

  /// @param x outlives the fabric's `stop`; before `start`
  virtual void place_with(tensor_places& x) = 0;

  /// Like `fabric::send`.
  /// @param transfers a name per tensor, unique on this rank; 0: the receiver
  /// is not asked. Tensors of up to `riding_limit` bytes have none.
  virtual void send_marked(rank_id to, message x,
                           std::vector<uint64_t> transfers,
                           fabric::sent_callback done)
    = 0;

  /// Announces memory for many sends and receives. Call before `start`.
  virtual void register_memory(std::shared_ptr<std::byte> x, uint64_t size) = 0;
};

} // namespace smp
