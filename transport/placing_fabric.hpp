#pragma once

#include "transport/fabric.hpp"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace smp {

/// Tensors up to this size, in bytes, ride in the first message: to copy them
/// is cheaper than a transfer of their own. Nobody is asked where they shall
/// lie.
inline constexpr uint64_t riding_limit = 4096;

/// A tensor whose bytes are about to come.
struct arriving_tensor {
  rank_id from;
  /// The name that its sender gave it, never 0.
  uint64_t transfer = 0;
  uint64_t nbytes = 0;
};

/// Says where marked tensors come to lie, and hears where they came to lie on
/// the other side. Called on any thread, with locks of the fabric held: must
/// neither block nor call the fabric.
class tensor_places {
public:
  virtual ~tensor_places() = default;

  /// @returns memory for all of `x`, or null: the fabric takes its own.
  virtual std::shared_ptr<std::byte> place(const arriving_tensor& x) = 0;

  /// All bytes of a tensor that this rank sent are there.
  /// @param as_marked whether `place` gave them memory
  virtual void placed(rank_id by, uint64_t transfer, bool as_marked) = 0;
};

/// A fabric that asks the receiver where a tensor shall lie before its bytes
/// come, and tells the sender what became of it: the question goes with the
/// first message and the answer with the end of the transfer, so that neither
/// costs a round trip, and all of a tensor goes the way that was chosen once.
class placing_fabric {
public:
  virtual ~placing_fabric() = default;

  /// @param x outlives the fabric's `stop`; before `start`
  virtual void place_with(tensor_places& x) = 0;

  /// Like `fabric::send`.
  /// @param transfers a name per tensor, unique on this rank; 0: the receiver
  /// is not asked. Those of up to `riding_limit` bytes have none.
  virtual void send_marked(rank_id to, message x,
                           std::vector<uint64_t> transfers,
                           fabric::sent_callback done)
    = 0;

  /// Much will be sent from or received in this memory. Before `start`.
  virtual void register_memory(std::shared_ptr<std::byte> x, uint64_t size) = 0;
};

} // namespace smp
