#pragma once

// Who sends what to whom, as data: algorithms make plans (plan.hpp), and ranks
// carry them out (operation.hpp).

#include "transport/ids.hpp"

#include <cstdint>
#include <vector>

namespace smp {

/// Parts and segments begin at multiples of this, in bytes, so that they
/// consist of whole elements of any type and of whole cache lines.
inline constexpr uint64_t piece_alignment = 64;

/// In bytes.
struct byte_range {
  uint64_t begin = 0;
  uint64_t size = 0;
  bool operator==(const byte_range&) const = default;
};

struct collective_plan {
  /// A part of the input that is sent to another rank when the call begins.
  struct sending {
    uint64_t to = 0;    // position
    uint32_t piece = 0; // of the receiver
    byte_range range;   // of the input
  };

  /// A part of what this rank has to produce.
  struct piece {
    /// Names it in messages; unique on a rank.
    uint32_t id = 0;
    /// In the output, or if `apart`, in memory of its own.
    byte_range range;
    bool apart = false;
    /// Positions of the ranks that contribute to it, in the order of addition;
    /// a single source provides the piece as it is.
    std::vector<uint64_t> sources;
    /// Where in the input this rank's part begins, if it is a source.
    uint64_t own = 0;
    /// This is the final sum, which a mean divides.
    bool last_sum = true;
    /// Positions that receive the finished piece, and its id there.
    std::vector<uint64_t> forward;
    uint32_t forward_as = 0;
  };

  std::vector<sending> sends;
  /// Send copies of the input: the output may be complete before all ranks have
  /// received the input, and both may be the same memory.
  bool send_copies = false;
  std::vector<piece> pieces;
  /// Size of a segment, the unit of sending, in bytes; the same on all ranks.
  uint64_t segment = 0;
};

/// The machines on which the ranks of a group run, by position in the group.
struct group_places {
  std::vector<uint64_t> of; // machine, by position
  /// Positions by machine, ascending; machines in the order of first members.
  std::vector<std::vector<uint64_t>> members;

  /// @returns whether the group spans several machines, one with several ranks.
  bool mixed() const noexcept {
    return members.size() > 1 && members.size() < of.size();
  }
};

/// @param machine_of_rank machine of each rank, numbered in any way; empty: all
/// ranks share one
group_places places_of(const std::vector<rank_id>& group,
                       const std::vector<uint64_t>& machine_of_rank);

/// Limits, in bytes, by which algorithms are chosen and data is cut. Not
/// configurable, because all ranks must agree on them. Tests use other values.
struct collective_limits {
  /// The most that a rank sends where every rank computes the whole sum, in one
  /// step; for more, each computes a part, in two steps, and machines matter.
  uint64_t direct = 128 << 10;
  /// Up to this many ranks talk to each other directly; in larger groups small
  /// data travels along a tree.
  uint64_t direct_ranks = 8;
  uint64_t least_segment = 64 << 10;
  uint64_t largest_segment = 256 << 10;
  /// The same of a call on devices, which take as long to begin a copy or a sum
  /// as for a megabyte of it.
  uint64_t least_device_segment = 1 << 20;
  uint64_t largest_device_segment = 4 << 20;
  /// What a call may send to a rank before that rank is known to have joined.
  /// Bounds what a receiver keeps of ranks that are early.
  uint64_t unasked = 64 << 10;
  /// The same for all calls that a rank is not known to have joined, and for
  /// the number of their messages.
  uint64_t ahead = 8 << 20;
  uint64_t ahead_messages = 4096;
};

} // namespace smp
