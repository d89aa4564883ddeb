#pragma once

// Who sends what to whom, as data: what algorithms make (plan.hpp) and ranks
// carry out (operation.hpp).

#include "transport/ids.hpp"

#include <cstdint>
#include <vector>

namespace smp {

/// Parts and segments begin at such bytes: whole elements of any type, and
/// whole cache lines.
inline constexpr uint64_t piece_alignment = 64;

/// In bytes.
struct byte_range {
  uint64_t begin = 0;
  uint64_t size = 0;
  bool operator==(const byte_range&) const = default;
};

struct collective_plan {
  /// A part of the input that goes to another rank at once.
  struct sending {
    uint64_t to = 0;    // position
    uint32_t piece = 0; // of the receiver
    byte_range range;   // of the input
  };

  /// A part of what this rank has to make.
  struct piece {
    /// Names it in messages; unique on a rank.
    uint32_t id = 0;
    /// Of the output, or of memory of its own.
    byte_range range;
    bool apart = false;
    /// Positions of those that give something to it, in the order in which it
    /// is added up; one gives what it is.
    std::vector<uint64_t> sources;
    /// Where in the input the own part begins, if this rank is among them.
    uint64_t own = 0;
    /// The sum is divided.
    bool last_sum = true;
    /// Positions that get the finished piece, and its name there.
    std::vector<uint64_t> forward;
    uint32_t forward_as = 0;
  };

  std::vector<sending> sends;
  /// The output may be there before all have the input, which may be the same
  /// memory.
  bool send_copies = false;
  std::vector<piece> pieces;
  /// What is sent at a time, in bytes; the same on all ranks.
  uint64_t segment = 0;
};

/// On which machines the ranks of a group are, all of them by position.
struct group_places {
  std::vector<uint64_t> of; // machine, by position
  /// By machine, ascending; machines in the order of their first members.
  std::vector<std::vector<uint64_t>> members;

  /// @returns whether there are several machines, and several ranks on one.
  bool mixed() const noexcept {
    return members.size() > 1 && members.size() < of.size();
  }
};

/// @param machine_of_rank of all ranks, any number for each machine; empty: all
/// are on one
group_places places_of(const std::vector<rank_id>& group,
                       const std::vector<uint64_t>& machine_of_rank);

/// What the algorithms are chosen and cut by, in bytes. Not in a
/// configuration: all ranks must have the same. Tests have others.
struct collective_limits {
  /// Up to so much altogether leaves a rank where a sum is made by everybody,
  /// in one step; else each makes a part, in two, and machines are told apart.
  uint64_t direct = 128 << 10;
  /// So many ranks talk to each other directly; above, small things go along
  /// a tree.
  uint64_t direct_ranks = 8;
  uint64_t least_segment = 64 << 10;
  uint64_t largest_segment = 256 << 10;
  /// To one rank, before it is known to be there. Bounds what is kept of those
  /// who are early.
  uint64_t unasked = 64 << 10;
  /// The same for all calls that it is not known to have joined, and for the
  /// number of their messages.
  uint64_t ahead = 8 << 20;
  uint64_t ahead_messages = 4096;
};

} // namespace smp
