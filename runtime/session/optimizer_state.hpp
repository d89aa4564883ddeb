#pragma once

// What LibTorch's optimizers remember, by name. LibTorch itself writes it only
// as a whole, and only into archives of its own.

#include "runtime/base/named_tensors.hpp"

#include <map>
#include <string>
#include <vector>

namespace torch::optim {
class Optimizer;
class OptimizerOptions;
} // namespace torch::optim

namespace smp {

/// @returns "AdamW".
/// @throws error (unsupported) if it is none of SGD, Adam, AdamW, Adagrad and
///         RMSprop
std::string type_of(torch::optim::Optimizer& x);

/// @returns all options of a group; true is 1
std::map<std::string, double> options_of(torch::optim::Optimizer& x,
                                         torch::optim::OptimizerOptions& group);

/// Sets those that `values` has.
void set_options(torch::optim::Optimizer& x,
                 torch::optim::OptimizerOptions& group,
                 const std::map<std::string, double>& values);

/// What an optimizer may remember of a parameter: a tensor of its shape, or a
/// count, which is int64 [].
struct state_field {
  std::string name;
  bool is_count = false;
};

std::vector<state_field> state_fields(torch::optim::Optimizer& x);

/// @returns what `x` remembers of a parameter, sharing its memory: tensors of
///          the parameter's shape, and counts, which are int64 []. Nothing
///          before its first update.
named_tensors state_of(torch::optim::Optimizer& x, const at::Tensor& parameter);

/// Replaces what `x` remembers of a parameter; nothing: as before its first
/// update. Takes the tensors as they are.
void set_state(torch::optim::Optimizer& x, const at::Tensor& parameter,
               const named_tensors& state);

} // namespace smp
