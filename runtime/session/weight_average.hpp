#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace torch::optim {
class Optimizer;
} // namespace torch::optim

namespace smp {

/// Exponential moving averages of the weights that an optimizer updates, by
/// whoever updates them (Polyak averaging, as `AveragedModel` of PyTorch).
class weight_average {
public:
  /// @param decay more than 0, less than 1
  /// @throws error (config) naming it
  explicit weight_average(double decay);

  /// Averages of all that is in the groups of `x` from now on.
  void begin(torch::optim::Optimizer& x);

  /// The first one is the weights after the first update.
  void update();

  /// @returns the average of a weight; undefined before its first update
  at::Tensor of(const at::Tensor& weight) const;

  void load(const at::Tensor& weight, const at::Tensor& average);

  struct entry {
    at::Tensor weight;
    at::Tensor average;
  };

  std::vector<entry>& entries() noexcept {
    return entries_;
  }

private:
  double decay_;
  std::vector<entry> entries_;
};

} // namespace smp
