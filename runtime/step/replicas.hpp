#pragma once

#include "runtime/replicas/gradient_report.hpp"
#include "transport/error.hpp"
#include "transport/ids.hpp"

#include <vector>

namespace smp {

class model_state;
class rank_context;
struct step_call;

/// Couples the replicas of a model (paper, section 3.2): each runs a step
/// in its own pipeline, on its own data. At the end of the step the ranks
/// that hold the same modules, a data-parallel group, exchange how it
/// ended and average the gradients that it changed. A no-op for a group of
/// one.
class replicas {
public:
  /// @param rank outlives this
  explicit replicas(const rank_context& rank) : rank_(rank) {
    // nop
  }

  /// The outcome of a step in all replicas.
  struct verdict {
    /// Why it failed, on any replica; empty if it succeeded.
    failure why = {};
    /// True if only user code failed, in one or more replicas. The same on all
    /// ranks.
    bool of_code = false;
  };

  /// Prepares for gradients; called again when a step is rolled back.
  /// @throws error (config) if a replica has left
  void begin_step(model_state& model, const step_call& x) const;

  /// Exchanges the outcome of the step; then all ranks alike call one of the
  /// two below. Collective over the data-parallel group.
  /// @param model may be null
  /// @param mine how the step went on this rank
  verdict hear(model_state* model, const failure& mine);

  /// Discards gradients averaged so far: all replicas roll the step back.
  /// Collective.
  void take_back(model_state& model);

  /// Averages gradients if the step succeeded and averaging is due. Collective.
  void end_step(model_state* model, const failure& why);

  /// Compares the parameters that forward changes, each replica by its own
  /// samples. Collective over the run.
  /// @throws error (unsupported), the same on all ranks, if they differ
  void compare_parameters(const model_state& model) const;

  /// This rank takes part in no more steps; ranks still in a step are told.
  /// Collective over the data-parallel group, whose other ranks may be at the
  /// end of a step.
  void leave();

  /// Failures that end a session; other ranks detect them by themselves.
  static bool ends_session(const failure& x);

private:
  /// Tells whether gradients are averaged at the end of this training step.
  bool averages(model_state& model) const;

  void end_training(model_state& model) const;

  void share_buffers(const model_state& model) const;

  /// The ranks that hold the same modules.
  std::vector<rank_id> group() const;

  const rank_context& rank_;
  /// Why no further step can run: a replica left.
  failure left_;
  /// The gradient reports that `hear` received.
  gradient_report all_;   // of all ranks, merged
  gradient_report first_; // of the first one
  bool same_buckets_ = true;
};

} // namespace smp
