#pragma once

// Tensors whose bytes do not exist yet, see delay_param_initialization.hpp.

#include <ATen/core/Tensor.h>

#include <vector>

namespace smp {

/// Tells whether this thread is in a `delay_param_initialization` scope.
bool in_deferred_scope();

/// Tells whether `x` has no bytes yet.
bool is_deferred(const at::Tensor& x);

/// Computes the bytes of the deferred tensors among `xs`, in place: every
/// handle on them sees an ordinary tensor from now on. In addition this needs
/// the memory that their initialisers use at one time.
void initialise_deferred(const std::vector<at::Tensor>& xs);

/// The bytes of `x` are not needed: drops how to compute them. Does nothing to
/// an ordinary tensor.
void forget_deferred(const at::Tensor& x);

} // namespace smp
