#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace torch::optim {
class Optimizer;
} // namespace torch::optim

namespace smp {

/// Exponential moving averages of the weights that an optimizer updates, on the
/// ranks that update them (Polyak averaging, as PyTorch's `AveragedModel`).
class weight_average {
public:
  /// @param decay more than 0, less than 1
  /// @throws error (config) naming it
  explicit weight_average(double decay);

  /// Starts averaging everything in the groups of `x`.
  void begin(torch::optim::Optimizer& x);

  /// Updates the averages; the first one equals the weights at that time.
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
