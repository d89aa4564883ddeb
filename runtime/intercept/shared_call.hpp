#pragma once

#include "runtime/intercept/call_scope.hpp"

#include <ATen/core/Tensor.h>

namespace smp {

class distributed_module;

/// Runs this rank's part of a call that tensor-parallel ranks share.
/// @param call already entered
/// @param object identity of the module, see `call_interceptor::arguments`
at::Tensor run_shared(call_scope& call, const distributed_module& how,
                      const void* object, const at::Tensor& x);

} // namespace smp
