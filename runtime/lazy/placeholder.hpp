#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>
#include <torch/csrc/autograd/function.h>

#include <cstdint>
#include <memory>
#include <string>

namespace c10 {
class OperatorHandle;
} // namespace c10

namespace smp {

/// The source of the values of a model's placeholders (`model_context`).
class placeholder_source {
public:
  virtual ~placeholder_source() = default;

  /// @returns the position of a placeholder among the model's tensors.
  /// @throws error (unsupported) if it is not of the model
  virtual uint32_t position(const at::Tensor& x) const = 0;

  virtual bool is_buffer(uint32_t tensor) const = 0;

  /// @returns a copy of the value. Parks.
  virtual at::Tensor fetch(uint32_t tensor) = 0;

  /// Gives a buffer a new value. Parks.
  virtual void store(uint32_t tensor, const at::Tensor& x) = 0;

  /// Code may write into a view of `copy`, which `fetch` returned.
  virtual void lend(uint32_t tensor, const at::Tensor& copy) = 0;

  /// @throws error: `op` would change a parameter in place
  [[noreturn]] virtual void refuse_write(uint32_t tensor,
                                         const std::string& op) const = 0;

  /// Runs an operation on the rank that has its arguments, if that pays.
  /// @param stack arguments of `op`, replaced by its results
  virtual bool run_at_owner(const c10::OperatorHandle& op,
                            torch::jit::Stack& stack)
    = 0;
};

/// Frees the bytes of a parameter or buffer that another rank owns (R14): the
/// tensor keeps its sizes, type and identity for every handle on it, but any
/// operation on it first fetches the value from its owner. In-place changes of
/// a buffer go to its owner; those of a parameter are refused by name. (A meta
/// tensor would compute nonsense instead.)
/// @param gradient takes the gradient to the owner, whenever `x` requires
/// grad, and outlives `x` in its graphs; null if there never is one. It
/// replaces the node of a leaf that adds to the leaf's own gradient, which
/// would be lost silently, as no owner sees it. (`x` is a leaf, so that its
/// requires_grad can be changed.)
void make_placeholder(const at::Tensor& x,
                      const std::shared_ptr<torch::autograd::Node>& gradient);

/// Tells whether `make_placeholder` was called for `x`.
bool is_placeholder(const at::Tensor& x);

/// @returns `x` itself, made an ordinary tensor if it was a promise, or the
/// fetched value of a placeholder. Parks.
at::Tensor materialise(const at::Tensor& x);

} // namespace smp
