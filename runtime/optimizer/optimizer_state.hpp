#pragma once

// The state of LibTorch's optimizers, by name. LibTorch itself writes it only
// as a whole, and only into its own archives.

#include "runtime/base/named_tensors.hpp"

#include <map>
#include <string>
#include <vector>

namespace torch::optim {
class Optimizer;
class OptimizerOptions;
} // namespace torch::optim

namespace smp {

/// @returns the type name, such as "AdamW".
/// @throws error (unsupported) if it is none of SGD, Adam, AdamW, Adagrad and
/// RMSprop
std::string type_of(torch::optim::Optimizer& x);

/// @returns all options of a group; true is 1
std::map<std::string, double> options_of(torch::optim::Optimizer& x,
                                         torch::optim::OptimizerOptions& group);

/// Sets the options that `values` has.
void set_options(torch::optim::Optimizer& x,
                 torch::optim::OptimizerOptions& group,
                 const std::map<std::string, double>& values);

/// One field of an optimizer's state for a parameter: a tensor of its shape, or
/// a count, which is int64 [].
struct state_field {
  std::string name;
  bool is_count = false;
};

std::vector<state_field> state_fields(torch::optim::Optimizer& x);

/// @returns the state that `x` has for a parameter, sharing its memory: tensors
/// of the parameter's shape, and counts, which are int64 []. Empty before its
/// first update.
named_tensors state_of(torch::optim::Optimizer& x, const at::Tensor& parameter);

/// Replaces the state that `x` has for a parameter; empty: as before its first
/// update. Keeps the given tensors without copying.
void set_state(torch::optim::Optimizer& x, const at::Tensor& parameter,
               const named_tensors& state);

/// Gives the state that `x` has for a parameter to another one in its place, on
/// the device of that. What optimizers of unknown type remember stays where it
/// is.
void move_state(torch::optim::Optimizer& x, const at::Tensor& from,
                const at::Tensor& to);

} // namespace smp
