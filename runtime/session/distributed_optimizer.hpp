#pragma once

#include "runtime/session/distributed_model.hpp"
#include "runtime/session/optimizer_shards.hpp"

#include <memory>
#include <optional>

namespace torch::optim {
class Optimizer;
} // namespace torch::optim

namespace smp {

/// Lets any `torch::optim` optimizer work on a partitioned model. The user
/// makes it as always, before the partition, with groups; at the partition it
/// keeps its groups and drops the parameters that this rank does not own
/// (R21). Parameters that are listed several times (tied weights) stay once.
class distributed_optimizer {
public:
  /// @param x outlives this
  explicit distributed_optimizer(torch::optim::Optimizer& x);

  /// Updates what this rank owns.
  void step();

  /// Drops the gradients of what this rank owns.
  void zero_grad();

  torch::optim::Optimizer& inner() noexcept {
    return optimizer_;
  }

  /// What the optimizer knows of a parameter on this rank.
  struct known_part {
    at::Tensor values;
    /// Where it is in the whole; null: it is the whole.
    const tensor_slice* where = nullptr;
    /// No other rank knows a part that lies before it.
    bool first = true;
    /// No other replica knows it.
    bool alone = false;
  };

  /// @param slice what this rank has of the parameter; null: the whole
  /// @returns nothing if another rank updates it
  std::optional<known_part> part_of(const at::Tensor& parameter,
                                    const tensor_slice* slice) const;

  /// @param x of a group of `inner()`
  /// @returns the parameter that it is, or a part of
  at::Tensor parameter_of(const at::Tensor& x) const;

private:
  torch::optim::Optimizer& optimizer_;
  optimizer_shards shards_;
  /// Ends the hook when this goes before the model.
  std::shared_ptr<bool> alive_;
};

/// Scales all gradients so that their 2-norm over all ranks is at most
/// `max_norm`. Collective over the ranks that hold the model
/// together. (torch's own function would
/// see the gradients of one rank only.)
/// @returns the norm before
double clip_grad_norm_(distributed_model_base& model, double max_norm);

/// Tells whether any gradient on any rank is infinite or NaN. Collective over
/// the pipeline group.
bool any_nonfinite(distributed_model_base& model);

} // namespace smp
