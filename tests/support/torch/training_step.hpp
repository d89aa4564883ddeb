#pragma once

// The step that most tests train with.

#include "smp/smp.hpp"

#include <torch/types.h>

#include <functional>

namespace smp::test {

/// @returns a step that calls the model, makes a loss of its result, and goes
/// back from that
/// @param model outlives the step
template <class Model, class LossOf = std::identity>
auto training_step(Model& model, LossOf loss_of = {}) {
  return step([&model, loss_of](torch::Tensor x) {
    auto loss = loss_of(model(x));
    model.backward(loss);
    return loss;
  });
}

inline torch::Tensor sum_of(const torch::Tensor& x) {
  return x.sum();
}

inline torch::Tensor mean_of(const torch::Tensor& x) {
  return x.mean();
}

inline torch::Tensor square_sum_of(const torch::Tensor& x) {
  return x.square().sum();
}

inline torch::Tensor mean_square_of(const torch::Tensor& x) {
  return x.square().mean();
}

} // namespace smp::test
