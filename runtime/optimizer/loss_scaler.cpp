#include "runtime/optimizer/loss_scaler.hpp"

#include "transport/error.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace smp {

namespace {

/// Upper bound of the scale; no gradient needs a larger one.
constexpr double largest = 0x1p32;

void check(const char* key, double x, double low) {
  if (!(x > low && x <= largest))
    throw config_error(
      fmt::format("{} = {} is out of range; allowed: more than {}, at most {}",
                  key, x, low, largest));
}

} // namespace

loss_scaler::loss_scaler(double fixed) : value_(fixed) {
  check("static_loss_scale", fixed, 0);
}

loss_scaler::loss_scaler(const dynamic_loss_args& x)
  : args_(x), value_(x.init_scale) {
  check("dynamic_loss_args.init_scale", x.init_scale, 0);
  check("dynamic_loss_args.scale_factor", x.scale_factor, 1);
  check("dynamic_loss_args.min_scale", x.min_scale, 0);
  if (x.scale_window == 0)
    throw config_error(
      "dynamic_loss_args.scale_window = 0 is out of range; "
      "allowed: 1 or more");
  if (x.min_scale > x.init_scale)
    throw config_error(fmt::format(
      "dynamic_loss_args.min_scale = {} is more than init_scale = {}",
      x.min_scale, x.init_scale));
}

void loss_scaler::update(bool finite) {
  if (!args_)
    return;
  if (finite) {
    if (++good_steps_ < args_->scale_window)
      return;
    value_ = std::min(value_ * args_->scale_factor, largest);
  } else if (value_ <= args_->min_scale) {
    throw error{error_code::numbers,
                fmt::format("gradients are not finite with a loss scale of {}, "
                            "the smallest that dynamic_loss_args.min_scale "
                            "allows: something else is wrong with them",
                            value_)};
  } else {
    value_ = std::max(value_ / args_->scale_factor, args_->min_scale);
  }
  good_steps_ = 0;
}

void loss_scaler::restore(double value, uint64_t good_steps) {
  if (!args_)
    return;
  value_ = std::clamp(value, args_->min_scale, largest);
  good_steps_ = good_steps;
}

// -- of a model ---------------------------------------------------------------

void model_loss_scale::follow(const std::shared_ptr<loss_scaler>& x) {
  if (scaler())
    throw error{error_code::unsupported,
                "another optimizer of the model scales the loss (with "
                "smp.fp16_params the first one does); give static_loss_scale "
                "or dynamic_loss_scale to that one only"};
  scaler_ = x;
}

double model_loss_scale::value() const {
  auto x = scaler();
  return x ? x->value() : 1.0;
}

at::Tensor model_loss_scale::divide(const at::Tensor& gradient) const {
  auto scale = value();
  if (!gradient.defined() || scale == 1)
    return gradient;
  auto wide = c10::isReducedFloatingType(gradient.scalar_type())
                ? gradient.to(at::kFloat)
                : gradient;
  return wide.div(scale);
}

} // namespace smp
