#pragma once

#include "runtime/session/gradient_report.hpp"
#include "transport/error.hpp"
#include "transport/ids.hpp"

#include <vector>

namespace smp {

class model_state;
class rank_context;
struct step_call;

/// What ties the replicas of a model together (paper, section 3.2): each runs a
/// step in a pipeline of its own, on data of its own, and at its end the ranks
/// that hold the same modules, a data-parallel group, tell each other how it
/// ended, and have the mean of the gradients that the step changed. A group of
/// one does nothing.
class replicas {
public:
  /// @param rank outlives this
  explicit replicas(const rank_context& rank) : rank_(rank) {
    // nop
  }

  /// How a step went in all replicas.
  struct verdict {
    /// Why it failed, here or elsewhere; nothing if it succeeded.
    failure why = {};
    /// Code failed, and nothing else, in one or several of them. The same on
    /// all ranks.
    bool of_code = false;
  };

  /// Prepares for gradients; again where a step is taken back.
  /// @throws error (config) if a replica has left
  void begin_step(model_state& model, const step_call& x) const;

  /// Hears how the step went elsewhere; then one of the two below follows, on
  /// all ranks the same. Collective over the data-parallel group.
  /// @param model may be null
  /// @param mine how the step went on this rank
  verdict hear(model_state* model, const failure& mine);

  /// Drops what was averaged already: all replicas take the step back.
  /// Collective.
  void take_back(model_state& model);

  /// Averages gradients if the step succeeded and it is time. Collective.
  void end_step(model_state* model, const failure& why);

  /// This rank takes part in no more steps: those who still run one hear of it.
  /// Collective over the data-parallel group, of which others may be at the end
  /// of a step.
  void leave();

  /// What a session does not survive; others hear of it by themselves.
  static bool ends_session(const failure& x);

private:
  /// Tells whether gradients are averaged at the end of this training step.
  bool averages(model_state& model) const;

  void end_training(model_state& model) const;

  void share_buffers(const model_state& model) const;

  /// The ranks that hold the same modules.
  std::vector<rank_id> group() const;

  const rank_context& rank_;
  /// Why no step can be run any more: a replica left.
  failure left_;
  /// What `hear` heard of gradients.
  gradient_report all_;   // of all ranks, merged
  gradient_report first_; // of the first one
  bool same_buckets_ = true;
};

} // namespace smp
