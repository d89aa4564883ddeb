#pragma once

// What one active message carries. Nothing here depends on UCX, so that the
// parser can be tested with bytes that no correct rank sends.
//
// A message leaves as one unit where it fits: its description travels in the
// header of the active message, its first large tensor as the data. Further
// large tensors, and what is longer than a chunk, follow as units of their own,
// which may arrive before the description.

#include "transport/fabric.hpp"
#include "transport/files/run_secret.hpp"
#include "transport/inspect.hpp"
#include "transport/memory/block_pool.hpp"
#include "transport/placing_fabric.hpp"

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <tuple>
#include <vector>

namespace smp::ucx {

// -- limits -------------------------------------------------------------------

/// Tensors up to this size, in bytes, are copied behind the envelope.
inline constexpr uint64_t packed_limit = riding_limit;

/// Larger tensors are cut into chunks. 64 MB in one piece run at half the speed
/// of 16 MB, and hold up the progress thread.
inline constexpr uint64_t chunk_size = uint64_t{16} << 20;

/// No tensor is larger, in bytes: a corrupted size must not be believed.
inline constexpr uint64_t tensor_limit = uint64_t{1} << 44;

// -- header -------------------------------------------------------------------

enum class unit_kind : uint8_t {
  description,      // of a message; follows in the header of the active message
  long_description, // of a message; is the data of the active message
  chunk,            // bytes of a tensor
  placed,           // all bytes of a marked tensor have arrived: its name is
                    // the number, and the offset is 1 if it lies as marked
  goodbye, // nothing follows; an end that is not a loss. A rank that leaves
           // because it lost another one names that: the number, from 1
};

constexpr unit_kind last_of(unit_kind) noexcept {
  return unit_kind::goodbye;
}

/// What the data of an active message is.
enum class data_kind : uint8_t {
  none,
  marker, // one byte without meaning, sent as a rendezvous (flow control)
  bytes,  // of the description or of a tensor, as the unit kind says
};

constexpr data_kind last_of(data_kind) noexcept {
  return data_kind::bytes;
}

/// Begins every active message.
struct unit_header {
  unit_kind kind = unit_kind::description;
  data_kind data = data_kind::none;
  uint32_t from = 0;
  /// Position in its message of the tensor that the data belongs to.
  uint32_t tensor = 0;
  /// Of the message, unique for its sender.
  uint64_t number = 0;
  /// Where the data begins in the tensor, in bytes.
  uint64_t offset = 0;
  /// Size of the whole tensor, in bytes.
  uint64_t tensor_size = 0;
  /// Name of the tensor if the receiver is asked where to place it; 0: it is
  /// not.
  uint64_t transfer = 0;

  bool operator==(const unit_header&) const = default;
};

/// Precedes the fields: "PS", and the version.
inline constexpr uint32_t header_mark = 0x04'5350;

/// Bytes that a header takes, including the token that begins it.
inline constexpr size_t header_size = std::tuple_size_v<run_token> + 46;

/// @param to `header_size` bytes or more
void write_header(std::span<std::byte> to, const unit_header& x,
                  const run_token& token);

/// Checks the token before anything else: UCX itself accepts messages from any
/// process that reaches its port (R44).
/// @returns nothing when `bytes` does not begin with a header of this run.
std::optional<unit_header> read_header(std::span<const std::byte> bytes,
                                       const run_token& token);

// -- description --------------------------------------------------------------

/// Whether `x` travels inside the description of its message.
bool is_packed(const tensor_ref& x) noexcept;

/// @returns the description of `x`, after `prefix` bytes left free.
std::vector<std::byte> write_description(const message& x, size_t prefix);

/// A message without the bytes of its large tensors.
struct description {
  message content;
  /// Positions of tensors whose bytes travel separately; their `data` is null.
  std::vector<uint32_t> apart;
};

/// @param pool provides the block of all packed tensors
/// @throws error (protocol), std::bad_alloc
description read_description(std::span<const std::byte> bytes,
                             block_pool& pool);

} // namespace smp::ucx
