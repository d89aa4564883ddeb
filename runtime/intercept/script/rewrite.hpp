#pragma once

#include "runtime/model/script_code.hpp"

namespace smp {

/// Nobody can hook into the calls of TorchScript from outside: the interpreter
/// goes from method to method by itself. So every method of every class gets
/// another body, one operation `smp::call(self, arguments..., name)`, which
/// asks first where it has to run; the code itself is kept beside it. Reads
/// and writes of attributes that can differ between ranks become
/// `smp::getattr(object, name)` and `smp::setattr(object, value, name)`; a list
/// or dictionary that is read to be changed comes by `smp::changeattr`. All
/// other reads stay: such attributes are the same everywhere, or tensors that
/// are fetched when they are used (R14).
/// `torch.dropout` becomes `smp::dropout`, which draws the same numbers whether
/// or not TorchScript has optimised the code around it.
/// Rewritten classes stay as they are. Call it before a method first ran.
void rewrite(const std::vector<c10::ClassTypePtr>& classes,
             const script_code& code);

} // namespace smp
