#pragma once

#include <ATen/core/function.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>

#include <string>

namespace smp {

/// The original code of a method, without the lookup of where to run.
/// @throws error (protocol) if there is none
torch::jit::Function& body_of(const c10::ivalue::Object& self,
                              const std::string& method);

/// Runs such code. Where a trace has the rows of a whole batch in it,
/// LibTorch's error only says that a shape does not fit: this one tells that
/// microbatches have fewer.
/// @param stack (self, arguments...)
void run_code(torch::jit::Function& code, torch::jit::Stack& stack);

} // namespace smp
