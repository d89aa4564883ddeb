#pragma once

// Ranks and their groups as pure functions (paper, section 3).

#include "transport/ids.hpp"

#include <cstdint>
#include <string>
#include <vector>

namespace smp {

/// Kinds of groups in a layout: every rank is in one group of each kind.
enum class group_kind : uint8_t {
  world, // all ranks
  pp,    // one pipeline: ranks with different modules of one replica
  tp,    // ranks with slices of the same modules
  rdp,   // ranks with the same slices of the same modules
  dp,    // ranks with the same modules: tp x rdp
  mp,    // one replica of the model: pp x tp
};

/// @returns the name of `x` in configurations and logs.
const char* to_string(group_kind x) noexcept;

/// A set of ranks that communicate: the caller's group of a kind, or ranks that
/// the user lists.
class comm_group {
public:
  static const comm_group world;
  static const comm_group pp;
  static const comm_group tp;
  static const comm_group rdp;
  static const comm_group dp;
  static const comm_group mp;

  constexpr comm_group(group_kind x) : kind_(x) {
    // nop
  }

  /// @param ranks in any order; each of them must pass the same set
  /// @throws error (config) if the list is empty or has a rank twice
  explicit comm_group(const std::vector<uint64_t>& ranks);

  /// Meaningless if the user listed the ranks.
  constexpr group_kind kind() const noexcept {
    return kind_;
  }

  /// Ascending; empty unless the user listed them.
  const std::vector<rank_id>& named_ranks() const noexcept {
    return ranks_;
  }

  bool operator==(const comm_group&) const = default;

private:
  group_kind kind_ = group_kind::world;
  std::vector<rank_id> ranks_;
};

inline constexpr comm_group comm_group::world{group_kind::world};
inline constexpr comm_group comm_group::pp{group_kind::pp};
inline constexpr comm_group comm_group::tp{group_kind::tp};
inline constexpr comm_group comm_group::rdp{group_kind::rdp};
inline constexpr comm_group comm_group::dp{group_kind::dp};
inline constexpr comm_group comm_group::mp{group_kind::mp};

/// How a rank is addressed: "pp_rank 1" is the second rank of the caller's
/// group of this kind.
using rank_type = comm_group;

/// @returns "pp", or "ranks 0, 2".
std::string to_string(const comm_group& x);

/// The configuration keys that determine the layout.
struct layout_config {
  uint64_t size = 1;                 // ranks in the world
  uint64_t pipeline = 1;             // smp.pipeline_parallel_degree
  uint64_t tensor = 1;               // smp.tensor_parallel_degree
  bool ddp = false;                  // smp.ddp
  std::string placement = "cluster"; // smp.placement_strategy
};

/// Position of a rank along each axis of the layout.
struct rank_coordinates {
  uint64_t pp = 0;
  uint64_t tp = 0;
  uint64_t rdp = 0;
  auto operator<=>(const rank_coordinates&) const = default;
};

/// A rank knows one number, its position in the world; its role follows from
/// its position along three axes: pipeline (P), tensor (T) and reduced data
/// parallel (D). The placement strategy is a permutation of these letters:
/// ranks that differ only along the right-most letter are neighbours. "cluster"
/// is "DPT" (tensor-parallel ranks close together), "spread" is "TPD".
class rank_layout {
public:
  /// @throws error (config) naming the key that is invalid.
  explicit rank_layout(const layout_config& x);

  /// Number of ranks in each group of this kind.
  uint64_t size(const comm_group& group) const;

  /// Position of `x` in its group, from 0.
  uint64_t rank(const comm_group& group, rank_id x) const;

  /// The group that `x` belongs to, ascending and in the order of `rank`.
  /// @throws error (config) if the user listed the ranks, and the list lacks
  /// `x` or has a rank that does not exist
  std::vector<rank_id> members(const comm_group& group, rank_id x) const;

  /// The rank that `x` addresses in this way.
  /// @throws error (config) if the group of `x` has no such rank
  rank_id named(const rank_type& type, uint64_t position, rank_id x) const;

  /// All groups of this kind; each rank is in exactly one.
  std::vector<std::vector<rank_id>> groups(group_kind kind) const;

  rank_coordinates coordinates(rank_id x) const;

  rank_id at(const rank_coordinates& x) const;

  /// Sets the machine of each rank, by any name; until then all ranks are on
  /// one machine. No group depends on it.
  void place(const std::vector<std::string>& machine_of_rank);

  /// Number of machines.
  uint64_t machines() const noexcept;

  /// The machine of each rank, numbered from 0 in the order of their first
  /// ranks.
  std::vector<uint64_t> machine_of_ranks() const;

  /// Position of `x` on its machine.
  uint64_t local_rank(rank_id x) const;

  /// Number of ranks on the machine of `x`.
  uint64_t local_size(rank_id x) const;

private:
  void check(rank_id x) const;
  std::vector<rank_id> checked(const comm_group& named, rank_id x) const;

  uint64_t size_;
  std::vector<uint64_t> machine_of_; // by rank; empty: one machine
  rank_coordinates degrees_;
  rank_coordinates strides_; // step between neighbours along each axis
};

} // namespace smp
