#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace torch::optim {
class Optimizer;
} // namespace torch::optim

namespace smp {

/// Float32 weights that an optimizer updates instead of parameters in half
/// precision (R56; Micikevicius et al. 2018): an update that is smaller than a
/// parameter's last digit is not lost.
class master_weights {
public:
  /// Replaces the parameters in half precision in the groups of `x`; of what
  /// the optimizer remembers already, its sums become float32 as well.
  void replace(torch::optim::Optimizer& x);

  /// Gives them the value of a parameter that somebody changed since the last
  /// note of values.
  void follow_parameters();

  /// The same, and the gradients of their parameters.
  void begin_update();

  /// Takes the gradients away and, after an update, casts the weights back.
  void end_update(bool updated);

  /// All that changes parameters in an update is done.
  void note_values();

  /// Drops the gradients of the parameters.
  void zero_grad();

  /// @returns the weights of a parameter, or `x` itself
  at::Tensor master_of(const at::Tensor& x) const;

  /// @returns the parameter of some weights, or `x` itself
  at::Tensor parameter_of(const at::Tensor& x) const;

  /// Sets the weights of a parameter that has their value, rounded.
  void load(const at::Tensor& master, const at::Tensor& value);

  bool empty() const noexcept {
    return entries_.empty();
  }

private:
  struct entry {
    at::Tensor parameter;
    at::Tensor master;
    /// Of the parameter, when both had the same value.
    uint64_t version = 0;
  };

  std::vector<entry> entries_;
};

} // namespace smp
