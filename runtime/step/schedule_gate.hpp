#pragma once

#include "partition/schedule/program.hpp"

#include <cstdint>
#include <set>
#include <string>
#include <vector>

namespace smp {

class rank_context;
class schedule_policies;

/// A step of a model begins only after its schedule was simulated against the
/// partition: a bad schedule would wait forever.
class schedule_gate {
public:
  schedule_gate(const rank_context& rank, const schedule_policies& policies)
    : rank_(rank), policies_(policies) {
    // nop
  }

  /// Simulates steps of this many microbatches, once per number that passes.
  /// Collective over the pipeline group.
  /// @throws error (config), the same on all ranks, naming the first wrong
  /// task; thrown again at the next attempt
  void check(const pipeline_program& program, uint64_t microbatches);

  /// The model chunk of each segment that this rank serves.
  const std::vector<uint32_t>& chunk_of(size_t pp_rank) const;

  /// The result of the last check, as text; on pp_rank 0.
  const std::string& text() const noexcept {
    return text_;
  }

private:
  const rank_context& rank_;
  const schedule_policies& policies_;
  std::set<uint64_t> passed_; // numbers of microbatches
  std::string text_;
  std::vector<std::vector<uint32_t>> chunk_of_; // by pp_rank
};

} // namespace smp
