#pragma once

#include "tests/simulated/backend/kernels.hpp"
#include "tests/simulated/backend/result_shapes.hpp"
#include "tests/simulated/driver/races.hpp"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <cstddef>
#include <optional>
#include <utility>
#include <vector>

namespace smp::sim {

using value_stack = torch::jit::Stack;

/// Where a kernel's results go.
struct call_results {
  /// What the caller gets.
  value_stack values;
  /// Which of the tensors that the kernel makes goes where.
  std::vector<std::pair<size_t, at::Tensor>> targets;
  std::vector<access> accesses;

  /// In a kernel: copies what the CPU kernel has made.
  /// @throws c10::Error if it has another shape
  void fill(const std::vector<at::Tensor>& made, const char* name) const;
};

/// A call of an operator with at least one tensor on a device.
class operator_call {
public:
  /// Takes the arguments for the CPU kernel: twins of device tensors, copies of
  /// host tensors, an engine of its own for what draws.
  /// @throws c10::Error as on a GPU, if tensors are on two devices, or on the
  /// host where only a number or indices may be
  operator_call(const c10::OperatorHandle&,
                c10::ArrayRef<c10::IValue> arguments);

  const c10::OperatorHandle& op() const {
    return op_;
  }

  const c10::FunctionSchema& schema() const {
    return op_.schema();
  }

  const char* name() const {
    return schema().name().c_str();
  }

  /// Says device and stream.
  const at::Tensor& on() const {
    return on_;
  }

  const value_stack& cpu_arguments() const {
    return cpu_;
  }

  const std::vector<access>& accesses() const {
    return accesses_;
  }

  /// Whether it writes to an argument that is empty so far: the CPU kernel has
  /// an empty tensor of its own for it.
  bool grows() const {
    return grows_;
  }

  /// What the meta kernel says, if there is one. Resizes the outputs that the
  /// caller has given.
  std::optional<result_shapes> ask_meta();

  /// Allocates what the call returns.
  call_results make_results(const result_shapes&) const;

  /// After the CPU kernel, which has been waited for: gives the outputs that
  /// were empty what it has put into its own.
  void copy_grown() const;

private:
  void take_arguments();

  c10::IValue taken(const c10::Argument&, const c10::IValue&, twins&);

  at::Tensor taken(const at::Tensor&, bool write, twins&);

  c10::IValue engine_for(const c10::IValue& generator) const;

  /// The argument that a returned value is, as the schema says.
  const c10::IValue& argument_of(const c10::AliasInfo& returned) const;

  bool writes(size_t argument) const;

  const c10::OperatorHandle& op_;
  c10::ArrayRef<c10::IValue> arguments_;
  at::Tensor on_;
  value_stack cpu_;
  std::vector<access> accesses_;
  bool grows_ = false;
};

/// @returns a tensor on the device of `on`
at::Tensor make_tensor(const at::Tensor& on, const shape&);

} // namespace smp::sim
