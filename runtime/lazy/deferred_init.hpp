#pragma once

// Tensors whose bytes do not exist yet, see delay_param_initialization.hpp.

#include <ATen/core/Tensor.h>

#include <vector>

namespace smp {

/// Tells whether this thread is in a `delay_param_initialization` scope.
bool in_deferred_scope();

/// Tells whether `x` has no bytes yet.
bool is_deferred(const at::Tensor& x);

/// Makes the bytes of the deferred ones among `xs`, in place: every handle on
/// them sees an ordinary tensor from now on. Beside them it needs the memory
/// of what their initialisers used at one time.
void initialise_deferred(const std::vector<at::Tensor>& xs);

/// Nobody needs the bytes of `x`: forgets how to make them. Does nothing to an
/// ordinary tensor.
void forget_deferred(const at::Tensor& x);

} // namespace smp
