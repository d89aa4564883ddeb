#pragma once

#include "runtime/optimizer/dynamic_loss_args.hpp"
#include "runtime/session/distributed_model.hpp"

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>

namespace torch::optim {
class Optimizer;
} // namespace torch::optim

namespace smp {

class loss_scaler;
struct tensor_slice;

/// Extra features of a `distributed_optimizer`. The loss scale belongs to the
/// model: `model.backward` multiplies by it, and all optimizers of the model
/// divide gradients by it; at most one of them has such an option. Without one,
/// the scale is 1, and with `smp.fp16_params` dynamic. Until the
/// division gradients are scaled; those that smp reports (`clip_grad_norm_`,
/// `gradients`) are not.
struct optimizer_options {
  std::optional<double> static_loss_scale = {};
  bool dynamic_loss_scale = false;
  smp::dynamic_loss_args dynamic_loss_args = {};
  /// Keeps weight averages: after an update, `ema_decay` times the old average
  /// plus (1 - `ema_decay`) times the new weight.
  std::optional<double> ema_decay = {};
  /// Updates in one pass over memory where a kernel exists (`update_fused`):
  /// faster, but the last digit of a result may differ from that of LibTorch's
  /// optimizer.
  bool fused = false;
};

/// Lets any `torch::optim` optimizer work on a partitioned model. The user
/// creates it as usual, with groups, before the partition; at the partition it
/// keeps its groups and drops the parameters that this rank does not own
/// (R21). Parameters listed several times (tied weights) stay once. With
/// `smp.bf16_params` or `smp.fp16_params` its groups then hold float32 weights
/// instead of the parameters (R56), and with `smp.offload_optimizer` on a
/// device copies in host memory.
class distributed_optimizer {
public:
  /// @param x outlives this
  /// @throws error (config) for a scale out of range, (unsupported) if
  /// another optimizer of the model scales the loss. After the partition
  /// also the errors of `check_optimizer`; before it, the first step throws
  /// those
  explicit distributed_optimizer(torch::optim::Optimizer& x,
                                 const optimizer_options& options = {});

  distributed_optimizer(const distributed_optimizer&) = delete;
  distributed_optimizer& operator=(const distributed_optimizer&) = delete;

  /// Updates the parameters that this rank owns. With a dynamic loss scale,
  /// collective over the world.
  /// @returns false if no rank updated anything: with a dynamic loss scale some
  /// gradient was not finite, and the scale is now smaller
  /// @throws error (numbers), on all ranks, if the scale cannot get smaller
  bool step();

  /// Drops the gradients of the parameters that this rank owns.
  void zero_grad();

  torch::optim::Optimizer& inner() const noexcept {
    return optimizer_;
  }

  /// Swaps the parameters with the averages of their weights; a second call
  /// swaps back. Does nothing before the first update. No `step` may run in
  /// between. Collective over the replicas.
  /// @throws error (unsupported) without `ema_decay`
  void swap_averages();

  /// True while the parameters hold the averages.
  bool is_averaged() const noexcept;

  // -- its state (paper, section 3.2.3) ---------------------------------------
  // Tensors called "PARAMETER/FIELD": "wte.weight/exp_avg", "wte.weight/step";
  // the fields of LibTorch's optimizer, and "master" and "average" where it
  // keeps float32 weights or averages. Options, such as learning rates, are not
  // part of it. Defined in runtime/checkpoint/optimizer_state_dict.cpp.

  /// @returns copies of the state of all parameters, whole, in the order of the
  /// model, the same on all ranks. Collective over the world
  /// @throws error (unsupported) before the partition, or for an optimizer
  /// whose state is unknown
  named_tensors state_dict() const;

  /// @returns copies of what this rank has: of a parameter that ranks share, or
  /// whose state replicas share, its part
  named_tensors local_state_dict() const;

  /// Takes over what belongs to this rank from the whole state or from its own
  /// local one; the state of a parameter that is not in it begins anew. Not
  /// collective.
  /// @throws error (config) naming all that is unknown, missing or of another
  /// shape, before anything is changed; else as `state_dict`
  void load_state_dict(const named_tensors& xs);

  /// The factor by which the next backward multiplies its loss.
  double loss_scale() const;

  /// The scaler created by an option of this optimizer, or null.
  loss_scaler* own_scaler() const noexcept;

  /// The part of a parameter that the optimizer updates on this rank.
  struct known_part {
    at::Tensor values;
    /// Which rows of this rank's parameter they are; null: all.
    const tensor_slice* where = nullptr;
    /// No other rank has an earlier part.
    bool first = true;
    /// No other replica has it.
    bool alone = false;
    /// `values` are the float32 weights of a half-precision parameter.
    bool is_master = false;
    /// Average of the values; undefined: none.
    at::Tensor average = {};
  };

  /// @param slice the slice of the parameter on this rank; null: the whole
  /// @returns nullopt if another rank updates it
  std::optional<known_part> part_of(const at::Tensor& parameter,
                                    const tensor_slice* slice) const;

  /// @param x a tensor in a group of `inner()`
  /// @returns the parameter that it is, or is a part of
  at::Tensor parameter_of(const at::Tensor& x) const;

  /// Sets the float32 weights of a part whose parameter has their value.
  void load_master(const known_part& x, const at::Tensor& value);

  void load_average(const known_part& x, const at::Tensor& average);

private:
  struct parts;

  torch::optim::Optimizer& optimizer_;
  /// Its destruction cancels the partition hook: this may die before the model.
  std::shared_ptr<parts> parts_;
};

/// Scales all gradients so that their 2-norm over all ranks, without the loss
/// scale, is at most `max_norm`. Collective over the ranks that hold the model
/// together; with `shard_gradients`, over all ranks. (torch's own function
/// would see the gradients of one rank only.)
/// @returns the norm before scaling, added up in float64
double clip_grad_norm_(distributed_model_base& model, double max_norm);

/// Tells whether any gradient on any rank is infinite or NaN. Collective over
/// the world.
bool any_nonfinite(distributed_model_base& model);

} // namespace smp
