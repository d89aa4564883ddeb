#pragma once

#include "runtime/deferred/boxed_call.hpp"

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

namespace smp {

/// Finds sizes and types of an operation's results before their bytes exist:
/// runs the operation on the meta device, which has no bytes, with the twins of
/// the deferred arguments.
class meta_trial {
public:
  /// @returns false if only values can tell the result
  bool run(const boxed_call& x);

  const torch::jit::Stack& results() const {
    return results_;
  }

  /// @returns the deferred argument that `twin` stands for, or nothing.
  at::Tensor find(const at::Tensor& twin) const;

  /// @returns a deferred argument with the memory of `twin`, or nothing.
  at::Tensor find_base(const at::Tensor& twin) const;

private:
  bool prepare(const std::string& name, c10::IValue& x);

  at::Tensor twin_of(const at::Tensor& x);

  /// False for a tensor that shares the memory of an ordinary argument.
  bool is_ours(const at::Tensor& x) const;

  std::vector<at::Tensor> arguments_; // the deferred ones
  std::vector<at::Tensor> others_;    // stand for the ordinary ones
  torch::jit::Stack results_;
};

} // namespace smp
