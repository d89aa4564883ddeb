#pragma once

// What the ranks of a session did in a step, for a comparison with one process.

#include "runtime/verify/call_log.hpp"
#include "runtime/verify/findings.hpp"
#include "runtime/verify/step_comparison.hpp"
#include "transport/ids.hpp"

#include <cstddef>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace smp {

class distributed_model_base;
class rank_runtime;

inline std::map<std::string, at::Tensor>
by_name(const std::vector<std::pair<std::string, at::Tensor>>& xs) {
  return {xs.begin(), xs.end()};
}

/// Gathers it on pp_rank 0 of each replica, where it is compared, and what is
/// found on rank 0. Each rank has one; what it gathers is collective.
class pipeline_evidence {
public:
  /// @param x outlives this
  explicit pipeline_evidence(rank_runtime& x);

  ~pipeline_evidence();

  pipeline_evidence(const pipeline_evidence&) = delete;
  pipeline_evidence& operator=(const pipeline_evidence&) = delete;

  /// @param x is partitioned, and outlives this
  void begin(const distributed_model_base& x);

  /// Logs the calls of this rank from now on, or no longer. One at a time.
  void observe(bool on);

  /// Of each parameter and buffer.
  const std::vector<tensor_names>& names() const noexcept {
    return names_;
  }

  /// @returns on pp_rank 0 what all ranks of the pipeline logged in the step
  observed_step gather_log();

  /// @param state parameters and buffers after the step
  /// @returns those that it has of the kinds that `names` has, in `result`
  void take_state(const std::map<std::string, at::Tensor>& state,
                  step_evidence& result) const;

  // -- of the replicas' pp_rank 0 ---------------------------------------------

  /// Replaces numbers of one process by what it would have for the whole batch.
  void average_over_replicas(step_evidence& x, bool first_buffers) const;

  /// Compares the step; `x` lacks what this knows of the model.
  void compare(step_comparison_input x, verify_summary& result) const;

  /// Gathers what the replicas found since the last time.
  void gather_findings(verify_summary& result);

  /// What is in `result` was found by rank 0 alone.
  void mark_told(const verify_summary& result) {
    told_ = result.findings.size();
  }

  // -- of all ranks -----------------------------------------------------------

  /// Sets the number of differences to that of rank 0.
  void share_differences(verify_summary& result) const;

  /// @returns the ranks with the same part of other replicas
  std::vector<rank_id> replicas() const;

private:
  template <class F>
  void each_in_shared(F f) const;

  void take_first_buffers(step_evidence& x,
                          const std::vector<rank_id>& group) const;

  rank_runtime& rank_;
  const distributed_model_base* model_ = nullptr;
  call_logger logger_;
  bool observes_ = false;
  std::vector<tensor_names> names_;
  size_t told_ = 0; // of the findings, how many rank 0 knows
};

} // namespace smp
