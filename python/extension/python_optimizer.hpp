#pragma once

#include "python/extension/interpreter.hpp"
#include "runtime/optimizer/foreign_optimizer.hpp"

#include <torch/optim/optimizer.h>

#include <memory>
#include <vector>

namespace smp::python {

/// A `torch.optim.Optimizer`: any class, as long as it keeps its state by
/// parameter and its options in groups. What smp puts into the groups, such as
/// the rows that this replica updates, Python's groups get before each update.
class python_optimizer final : public torch::optim::Optimizer,
                               public foreign_optimizer {
public:
  /// @param helper `smp._optimizer`
  python_optimizer(const py::object& inner, const py::module_& helper);

  at::Tensor step(LossClosure closure = nullptr) override;

  std::string type() const override;

  std::map<std::string, double>
  options_of(const torch::optim::OptimizerOptions& group) const override;

  void set_options(const torch::optim::OptimizerOptions& group,
                   const std::map<std::string, double>& values) override;

  std::vector<state_field> state_fields() const override;
  void expect_fields(const std::vector<state_field>& xs) override;
  named_tensors state_of(const at::Tensor& parameter) const override;
  void set_state(const at::Tensor& parameter,
                 const named_tensors& state) override;

  /// Gives Python's groups the tensors of these groups.
  void update_groups();

private:
  /// Says nothing but which group it is of.
  struct group_options;

  static std::vector<torch::optim::OptimizerParamGroup>
  groups_of(const py::object& inner);

  shared_object inner_;
  shared_object helper_;
  std::vector<std::vector<at::Tensor>> given_; // what Python's groups have
};

void bind_optimizer(py::module_& m);

} // namespace smp::python
