#pragma once

#include "runtime/intercept/call_scope.hpp"

#include <ATen/core/Tensor.h>

#include <span>
#include <vector>

namespace smp {

class distributed_module;
struct row_place;

/// Runs this rank's part of a call that tensor-parallel ranks share.
/// @param call already entered
/// @param object identity of the module, see `call_interceptor::arguments`
/// @param xs the tensors in its arguments @returns those in its result
std::vector<at::Tensor> run_shared(call_scope& call,
                                   const distributed_module& how,
                                   const void* object,
                                   std::span<const at::Tensor> xs);

/// The same for a layer in a row: see `distributed_module::forward_in_row`.
/// While an interceptor looks at tensors, each layer runs separately.
std::vector<at::Tensor>
run_shared(call_scope& call, const distributed_module& how, const void* object,
           std::span<const at::Tensor> xs, const row_place& place);

/// @throws error (user_code): ranks cannot share a call with such arguments
[[noreturn]] void refuse_shared_call();

} // namespace smp
