#pragma once

// Promises: tensors whose content another rank has or is still computing.

#include "transport/wait.hpp"

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

namespace smp {

/// Where the content of a promise comes from.
class promise_source {
public:
  virtual ~promise_source() = default;

  /// Waits until the sizes are known. @throws error with the first cause
  virtual std::vector<int64_t> sizes() = 0;

  /// Strides without gaps; empty: row-major. @returns nullopt if only the
  /// content tells them. @pre the sizes are known
  virtual std::optional<std::vector<int64_t>> strides() {
    return std::nullopt;
  }

  /// Starts the transfer of the content. @returns a completion that is done
  /// when it is here; the same one each time.
  virtual completion_ptr content() = 0;

  /// Waits until the content is here. @throws error with the first cause
  virtual void wait() {
    waiter::current().wait(content(), why());
  }

  /// The content, in memory of its own. @pre `content()` is done
  virtual at::Tensor take() = 0;

  /// The reason to show for a wait.
  virtual wait_reason why() const = 0;

  /// Tells whether `wait` has a position of its own in the order of the step:
  /// it must then be called for this content alone.
  virtual bool waits_in_order() const {
    return false;
  }
};

/// A call of another rank's module returns before it ran, so its result has no
/// bytes yet. A promise has dtype, requires_grad and a place in the autograd
/// graph like any tensor; reading its sizes waits for them, and any access to
/// the content makes it an ordinary tensor, in place: every handle on it sees
/// the same tensor as before. (It is a TensorImpl of its own, whose dispatch
/// key `absent_key` leads each operation to `keep_promises` first.)
/// @param known its sizes, if they are already known
/// @param device of the content
at::Tensor make_promise(std::shared_ptr<promise_source> x, at::ScalarType dtype,
                        const std::vector<int64_t>* known = nullptr,
                        at::Device device = at::kCPU);

/// Tells whether `x` is a promise whose content is not here yet.
bool is_promise(const at::Tensor& x);

/// @returns where the content of `x` comes from, or null if it is here.
std::shared_ptr<promise_source> source_of(const at::Tensor& x);

/// Makes `x`, if it is a promise, an ordinary tensor with the memory of
/// `content` without asking its source.
void keep_promise(const at::Tensor& x, const at::Tensor& content);

/// Makes the promises among `xs` ordinary tensors; waits once for all.
/// @throws error with the first cause; they stay promises
void keep_promises(const std::vector<at::Tensor>& xs);

/// Same for the tensors in `xs`, the arguments of an operation.
void keep_promises(at::ArrayRef<c10::IValue> xs);

} // namespace smp
