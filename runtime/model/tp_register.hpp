#pragma once

#include <string_view>
#include <typeinfo>

namespace smp {

/// See `tp_register`.
bool register_native(const std::type_info& impl, std::string_view as);

/// Lets tensor-parallel ranks share modules of class Impl as those of torch.nn
/// that are called `as` (paper, `smp.tp_register_with_module`): an Impl
/// computes the same, from parameters of the same names and shapes. "Linear",
/// "Embedding" or "Conv1D", a Linear whose weight is [in, out]. Before the
/// partition, on every rank.
/// @returns true
template <class Impl>
bool tp_register(std::string_view as) {
  return register_native(typeid(Impl), as);
}

} // namespace smp
