#pragma once

#include "runtime/session/distributed_model.hpp"
#include "runtime/session/dynamic_loss_args.hpp"

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>

namespace torch::optim {
class Optimizer;
} // namespace torch::optim

namespace smp {

class loss_scaler;
struct tensor_slice;

/// What a `distributed_optimizer` does besides. The scale of the loss belongs
/// to the model: `model.backward` multiplies by it, and all optimizers of the
/// model divide gradients by it, of which at most one has such an option. Until
/// then gradients are scaled; what smp tells of them (`clip_grad_norm_`,
/// `gradients`) is not.
struct optimizer_options {
  std::optional<double> static_loss_scale = {};
  bool dynamic_loss_scale = false;
  smp::dynamic_loss_args dynamic_loss_args = {};
  /// Keeps averages of the weights, each `ema_decay` times what it was and the
  /// rest of the new weight after an update.
  std::optional<double> ema_decay = {};
  /// Updates in one pass over the memory where there is a kernel
  /// (`update_fused`): faster, but the last place may differ from that of
  /// LibTorch's optimizer.
  bool fused = false;
};

/// Lets any `torch::optim` optimizer work on a partitioned model. The user
/// makes it as always, before the partition, with groups; at the partition it
/// keeps its groups and drops the parameters that this rank does not own
/// (R21). Parameters that are listed several times (tied weights) stay once.
/// With `smp.bf16_params` or `smp.fp16_params` its groups then hold float32
/// weights instead of the parameters (R56).
class distributed_optimizer {
public:
  /// @param x outlives this
  /// @throws error (config) for a scale out of range, (unsupported) if another
  ///         optimizer of the model scales the loss. After the partition also
  ///         what `check_optimizer` finds wrong; before it, the first step
  ///         throws that
  explicit distributed_optimizer(torch::optim::Optimizer& x,
                                 const optimizer_options& options = {});

  distributed_optimizer(const distributed_optimizer&) = delete;
  distributed_optimizer& operator=(const distributed_optimizer&) = delete;

  /// Updates what this rank owns. With a dynamic loss scale it is collective
  /// over the world.
  /// @returns false if no rank updated anything, because a gradient somewhere
  ///          is not finite with a dynamic loss scale, which is smaller now
  /// @throws error (numbers), the same on all ranks, if it cannot be smaller
  bool step();

  /// Drops the gradients of what this rank owns.
  void zero_grad();

  torch::optim::Optimizer& inner() noexcept {
    return optimizer_;
  }

  /// Exchanges the parameters with the averages of their weights, and back the
  /// second time; does nothing before the first update. In between there is no
  /// `step`. Collective over the replicas.
  /// @throws error (unsupported) without `ema_decay`
  void swap_averages();

  /// Whether the parameters are averages now.
  bool is_averaged() const noexcept;

  /// By which the next backward multiplies its loss.
  double loss_scale() const;

  /// The scale that an option of this optimizer made, or null.
  loss_scaler* own_scaler() const noexcept;

  /// What the optimizer knows of a parameter on this rank.
  struct known_part {
    at::Tensor values;
    /// Which rows they are of what this rank has; null: all.
    const tensor_slice* where = nullptr;
    /// No other rank knows a part that lies before it.
    bool first = true;
    /// No other replica knows it.
    bool alone = false;
    /// These are float32 weights of a parameter in half precision.
    bool is_master = false;
    /// Of the values; undefined: there is none.
    at::Tensor average = {};
  };

  /// @param slice what this rank has of the parameter; null: the whole
  /// @returns nothing if another rank updates it
  std::optional<known_part> part_of(const at::Tensor& parameter,
                                    const tensor_slice* slice) const;

  /// @param x of a group of `inner()`
  /// @returns the parameter that it is, or a part of
  at::Tensor parameter_of(const at::Tensor& x) const;

  /// Sets the float32 weights of a part, whose parameter has their value.
  void load_master(const known_part& x, const at::Tensor& value);

  void load_average(const known_part& x, const at::Tensor& average);

private:
  struct parts;

  torch::optim::Optimizer& optimizer_;
  /// Gone, it ends the hook at the partition: this may go before the model.
  std::shared_ptr<parts> parts_;
};

/// Multiplies all gradients by a number so that their 2-norm over all ranks,
/// without the scale of the loss, is at most `max_norm`. Collective over the
/// ranks that hold the model together, with `shard_gradients` over all.
/// (torch's own function would see the gradients of one rank only.)
/// @returns the norm before, computed in float32 at least
double clip_grad_norm_(distributed_model_base& model, double max_norm);

/// Tells whether any gradient on any rank is infinite or NaN. Collective over
/// the world.
bool any_nonfinite(distributed_model_base& model);

} // namespace smp
