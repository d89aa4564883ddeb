#pragma once

// The factor by which a loss is multiplied before backward, so that gradients
// do not vanish in float16 (Micikevicius et al. 2018). Knows no session.

#include "runtime/optimizer/dynamic_loss_args.hpp"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>

namespace smp {

/// A fixed scale, or one that follows the gradients: then all ranks must update
/// theirs alike.
class loss_scaler {
public:
  /// @throws error (config) naming the value out of range
  explicit loss_scaler(double fixed);
  explicit loss_scaler(const dynamic_loss_args& x);

  double value() const noexcept {
    return value_;
  }

  bool is_dynamic() const noexcept {
    return args_.has_value();
  }

  /// Steps with finite gradients since it last changed.
  uint64_t good_steps() const noexcept {
    return good_steps_;
  }

  /// Updates the scale after a step, by whether its gradients are finite.
  /// @throws error (numbers) if they are not finite at the smallest scale
  void update(bool finite);

  /// Restores a saved state; does nothing to a fixed scale.
  void restore(double value, uint64_t good_steps);

private:
  std::optional<dynamic_loss_args> args_;
  double value_ = 1;
  uint64_t good_steps_ = 0;
};

/// The scale of a model's loss (R56): set by one optimizer, since optimizers
/// see the gradients.
class model_loss_scale {
public:
  /// From now on, for the lifetime of `x`, the scale is that of `x`.
  /// @throws error (unsupported) if another scaler is in use
  void follow(const std::shared_ptr<loss_scaler>& x);

  /// Null: the loss is not scaled.
  std::shared_ptr<loss_scaler> scaler() const {
    return scaler_.lock();
  }

  /// 1 if the loss is not scaled.
  double value() const;

  /// @param gradient any shape; may be undefined
  /// @returns it without the scale; if there is a scale, in float32 or wider
  at::Tensor divide(const at::Tensor& gradient) const;

private:
  std::weak_ptr<loss_scaler> scaler_;
};

} // namespace smp
