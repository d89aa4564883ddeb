#pragma once

// Running what one process runs, in a rank of a session.

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <torch/csrc/jit/runtime/graph_executor.h>

namespace smp {

class call_observer;
class session;

/// Runs code without a session, and restores this thread's observer and random
/// numbers. TorchScript runs code as written: optimised code draws random
/// numbers even where nothing is dropped (docs/torchscript.md).
class apart {
public:
  /// @param device where it draws random numbers
  explicit apart(at::Device device);

  ~apart();

  apart(const apart&) = delete;
  apart& operator=(const apart&) = delete;

private:
  session* session_;
  call_observer* observer_;
  at::Generator generator_;
  at::Tensor numbers_;
  torch::jit::GraphOptimizerEnabledGuard as_written_{false};
};

/// R36, checked: a node of smp would mean that the pipeline compares itself
/// with itself.
/// @throws error (internal) if the graph of `x` has one
void check_plain(const at::Tensor& x);

/// @returns the gradient of a loss without its scale, dense, as the pipeline
/// gathers it
at::Tensor unscaled(const at::Tensor& gradient, double scale);

} // namespace smp
