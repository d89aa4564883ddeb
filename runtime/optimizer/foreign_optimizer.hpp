#pragma once

#include "runtime/base/named_tensors.hpp"
#include "runtime/optimizer/optimizer_state.hpp"

#include <map>
#include <string>
#include <vector>

namespace smp {

/// An optimizer of another language, as a torch::optim::Optimizer stands for
/// it: LibTorch's classes say nothing of its options and its state, so it does,
/// as the functions of optimizer_state.hpp do. Found by `dynamic_cast`.
class foreign_optimizer {
public:
  virtual ~foreign_optimizer() = default;

  virtual std::string type() const = 0;

  virtual std::map<std::string, double>
  options_of(const torch::optim::OptimizerOptions& group) const = 0;

  virtual void set_options(const torch::optim::OptimizerOptions& group,
                           const std::map<std::string, double>& values)
    = 0;

  virtual std::vector<state_field> state_fields() const = 0;

  /// What a file has of its state, before it has any itself.
  virtual void expect_fields(const std::vector<state_field>& xs) = 0;

  virtual named_tensors state_of(const at::Tensor& parameter) const = 0;

  virtual void set_state(const at::Tensor& parameter,
                         const named_tensors& state)
    = 0;
};

} // namespace smp
