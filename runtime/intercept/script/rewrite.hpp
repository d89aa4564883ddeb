#pragma once

#include "runtime/model/script_code.hpp"

namespace smp {

/// TorchScript calls cannot be hooked from outside: the interpreter goes from
/// method to method itself. So every method of every class gets a new body, one
/// operation `smp::call(self, arguments..., name)`, which first looks up where
/// to run; the original code is kept beside it. Reads and writes of attributes
/// that can differ between ranks become
/// `smp::getattr(object, name)` and `smp::setattr(object, value, name)`; a list
/// or dictionary that is read to be changed is read by `smp::changeattr`. All
/// other reads stay: such attributes are the same on all ranks, or tensors that
/// are fetched when used (R14).
/// `torch.dropout` becomes `smp::dropout`, which draws the same numbers whether
/// or not TorchScript has optimised the code around it. On a rank with a
/// device, constants that name one or are tensors pass `smp::device` or
/// `smp::constant`, which make them those of the rank, and so does the device
/// of operations that make tensors from numbers. Classes already rewritten are
/// skipped. Call before any method first runs.
/// @param as_written the code runs without optimisation
void rewrite(const std::vector<c10::ClassTypePtr>& classes,
             const script_code& code, bool as_written);

} // namespace smp
