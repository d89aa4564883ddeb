#pragma once

// The factor by which a loss is multiplied before backward, so that gradients
// do not vanish in float16 (Micikevicius et al. 2018). Knows no session.

#include "runtime/session/dynamic_loss_args.hpp"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>

namespace smp {

/// A scale that stays, or that follows the gradients: then all ranks must
/// update theirs alike.
class loss_scaler {
public:
  /// @throws error (config) naming what is out of range
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

  /// Hears of a step's gradients.
  /// @throws error (numbers) if they are not finite with the smallest scale
  void update(bool finite);

  /// Goes on from there; does nothing to a fixed one.
  void restore(double value, uint64_t good_steps);

private:
  std::optional<dynamic_loss_args> args_;
  double value_ = 1;
  uint64_t good_steps_ = 0;
};

/// The scale of a model's loss (R56): of one optimizer, as that knows the
/// gradients.
class model_loss_scale {
public:
  /// From now on, as long as somebody holds `x`, the scale is that of `x`.
  /// @throws error (unsupported) if it is that of another one
  void follow(const std::shared_ptr<loss_scaler>& x);

  /// Null: nothing scales.
  std::shared_ptr<loss_scaler> scaler() const {
    return scaler_.lock();
  }

  /// 1 where nothing scales.
  double value() const;

  /// @param gradient any shape; may be undefined
  /// @returns it without the scale, in float32 at least where there is one
  at::Tensor divide(const at::Tensor& gradient) const;

private:
  std::weak_ptr<loss_scaler> scaler_;
};

} // namespace smp
