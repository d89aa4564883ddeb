#pragma once

// Which rank does what (paper, section 3): ranks and groups as pure functions.

#include "transport/ids.hpp"

#include <string>
#include <vector>

namespace smp {

/// A set of ranks that cooperate in one kind of parallelism.
enum class comm_group : uint8_t {
  world, // all ranks
  pp,    // one pipeline: ranks that hold different modules of one replica
  tp,    // ranks that hold slices of the same modules
  rdp,   // ranks that hold the same slices of the same modules
  dp,    // ranks that hold the same modules: tp x rdp
  mp,    // one replica of the model: pp x tp
};

/// How a rank is named: "pp_rank 1" is the second one of the caller's group of
/// this kind.
using rank_type = comm_group;

/// @returns the name of `x` as it stands in configurations and logs.
const char* to_string(comm_group x) noexcept;

/// The keys of the configuration that decide who does what.
struct layout_config {
  uint64_t size = 1;                 // ranks in the world
  uint64_t pipeline = 1;             // smp.pipeline_parallel_degree
  uint64_t tensor = 1;               // smp.tensor_parallel_degree
  bool ddp = false;                  // smp.ddp
  std::string placement = "cluster"; // smp.placement_strategy
  uint64_t ranks_per_machine = 0;    // neighbouring ranks; 0: one machine
};

/// Position of a rank along each axis of the layout.
struct rank_coordinates {
  uint64_t pp = 0;
  uint64_t tp = 0;
  uint64_t rdp = 0;
  auto operator<=>(const rank_coordinates&) const = default;
};

/// A rank knows one number, its position in the world; everything that it does
/// depends on its position along three axes: pipeline (P), tensor (T) and
/// reduced data parallel (D). The placement strategy is a permutation of these
/// letters: ranks that differ only along the right-most letter are neighbours.
/// "cluster" is "DPT" (tensor-parallel ranks close together), "spread" "TPD".
class rank_layout {
public:
  /// @throws error (config) naming the key that does not fit.
  explicit rank_layout(const layout_config& x);

  /// Number of ranks in each group of this kind.
  uint64_t size(comm_group kind) const;

  /// Position of `x` in its group of this kind, from 0.
  uint64_t rank(comm_group kind, rank_id x) const;

  /// The group of this kind that `x` belongs to, in the order of `rank`.
  std::vector<rank_id> members(comm_group kind, rank_id x) const;

  /// The rank that `x` names so.
  /// @throws error (config) if the group of `x` has no such rank
  rank_id named(rank_type type, uint64_t position, rank_id x) const;

  /// All groups of this kind; each rank is in exactly one.
  std::vector<std::vector<rank_id>> groups(comm_group kind) const;

  rank_coordinates coordinates(rank_id x) const;

  rank_id at(const rank_coordinates& x) const;

  /// Position of `x` on its machine.
  uint64_t local_rank(rank_id x) const;

  /// Number of ranks on the machine of `x`.
  uint64_t local_size(rank_id x) const;

private:
  void check(rank_id x) const;

  uint64_t size_;
  uint64_t ranks_per_machine_;
  rank_coordinates degrees_;
  rank_coordinates strides_; // step between neighbours along each axis
};

} // namespace smp
