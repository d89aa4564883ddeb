#pragma once

// Operations that were captured instead of run, and running them later.

#include "runtime/base/random_stream.hpp"

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/typeid.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace smp {

struct captured_op;

using captured_op_ptr = std::shared_ptr<captured_op>;

/// One of the tensors that a captured operation returns.
struct captured_tensor {
  captured_op_ptr op;
  /// Position among all of its result tensors, with lists flattened.
  uint32_t index = 0;
};

/// An operation with everything that its result depends on. The pointers to
/// earlier operations form an acyclic graph; unreachable operations are freed.
struct captured_op {
  /// A captured tensor among the arguments.
  struct hole {
    uint32_t argument = 0;
    /// Position in a list of tensors, or 0.
    uint32_t element = 0;
    captured_tensor tensor;
  };

  captured_op(c10::OperatorHandle op, torch::jit::Stack arguments);

  /// Not recursive: a model's graph can be deep.
  ~captured_op();

  captured_op(const captured_op&) = delete;
  captured_op& operator=(const captured_op&) = delete;

  /// Increases in program order.
  uint64_t number;
  c10::OperatorHandle op;
  /// Undefined tensors where the holes are.
  torch::jit::Stack arguments;
  std::vector<hole> holes;
  /// The last writes to the memory of the arguments.
  std::vector<captured_op_ptr> before;
  /// Autocast and the like.
  c10::impl::LocalDispatchKeySet modes;
  caffe2::TypeMeta default_dtype;
  /// State of the default generator before the draw, if it draws from it.
  std::unique_ptr<random_stream> numbers;
};

/// @returns the tensors among the results of an operation, in the order in
/// which `captured_tensor` counts them
std::vector<at::Tensor> flatten_tensors(const torch::jit::Stack& results);

/// A tensor whose value is requested.
struct wanted_tensor {
  captured_tensor tensor;
  /// The last write to its memory.
  captured_op_ptr last_write;
};

/// Runs the operations that `xs` depend on, in program order. Groups of tensors
/// that have nothing in common are computed one after the other, and within a
/// group every tensor lives only until its last use.
/// @param f takes the position in `xs` and the value
void run_captured(const std::vector<wanted_tensor>& xs,
                  const std::function<void(size_t, at::Tensor)>& f);

/// Passes to `f` a function that runs `x` with another tensor in place of its
/// first argument, the only captured one, and returns the first result. Random
/// numbers start at the captured state and continue from call to call.
void run_on(const captured_op& x,
            const std::function<
              void(const std::function<at::Tensor(const at::Tensor&)>&)>& f);

} // namespace smp
