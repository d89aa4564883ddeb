#pragma once

// TorchScript values to values and back, with the types that the code of a
// method declares.

#include "runtime/values/pack.hpp"

#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>

namespace smp {

/// A module of the model goes as its position in the walk.
/// @throws error (unsupported) naming the place and the type if `x` cannot be
///         sent, e.g. another object of a class
value put_script_value(packer& p, const c10::IValue& x,
                       const c10::TypePtr& type);

/// Named tuples get their names from `type`.
/// @throws error (protocol) if `x` is no `type`
c10::IValue get_script_value(unpacker& u, const value& x,
                             const c10::TypePtr& type);

/// Lists, tuples and dictionaries of their own with the same items.
c10::IValue shallow_copy(const c10::IValue& x);

/// Tells whether two values have the same structure with the same tensors in
/// it, by identity.
bool same_content(const c10::IValue& x, const c10::IValue& y);

/// Gives the list or dictionary `x`, which others hold too, the items of `y`.
void replace_content(const c10::IValue& x, const c10::IValue& y);

} // namespace smp
