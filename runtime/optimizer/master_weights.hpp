#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace torch::optim {
class Optimizer;
} // namespace torch::optim

namespace smp {

/// Float32 weights that an optimizer updates in place of half-precision
/// parameters (R56; Micikevicius et al. 2018), so that an update smaller than a
/// parameter's last digit is not lost.
class master_weights {
public:
  /// Replaces the half-precision parameters in the groups of `x`; state that
  /// the optimizer already has is converted to float32 as well.
  void replace(torch::optim::Optimizer& x);

  /// Copies the value of each parameter that was changed since the last
  /// `note_values` into its master weight.
  void follow_parameters();

  /// The same, and hands the parameters' gradients to the weights.
  void begin_update();

  /// Drops the weights' gradients and, after an update, casts the weights back.
  void end_update(bool updated);

  /// Marks the end of all parameter changes of an update.
  void note_values();

  /// Drops the gradients of the parameters.
  void zero_grad();

  /// @returns the master weight of a parameter, or `x` itself
  at::Tensor master_of(const at::Tensor& x) const;

  /// @returns the parameter of a master weight, or `x` itself
  at::Tensor parameter_of(const at::Tensor& x) const;

  /// Sets the master weight of a parameter that has its value, rounded.
  void load(const at::Tensor& master, const at::Tensor& value);

  bool empty() const noexcept {
    return entries_.empty();
  }

private:
  struct entry {
    at::Tensor parameter;
    at::Tensor master;
    /// The parameter's version when both had the same value.
    uint64_t version = 0;
  };

  std::vector<entry> entries_;
};

} // namespace smp
