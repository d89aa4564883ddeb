#pragma once

// Converts TorchScript values to values and back, with the types that a
// method's code declares.

#include "runtime/values/pack.hpp"

#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>

namespace smp {

/// A module of the model is sent as its position in the walk.
/// @throws error (unsupported) naming the place and the type if `x` cannot be
/// sent, e.g. another object of a class
value put_script_value(packer& p, const c10::IValue& x,
                       const c10::TypePtr& type);

/// Named tuples get their names from `type`.
/// @throws error (protocol) if `x` does not fit `type`
c10::IValue get_script_value(unpacker& u, const value& x,
                             const c10::TypePtr& type);

/// The same for arguments. Parameters of modules that ranks share are sent as
/// their position in the walk: no code but that of these modules, to which
/// traces pass them, has use for what are slices.
value put_script_argument(packer& p, const c10::IValue& x,
                          const c10::TypePtr& type);
c10::IValue get_script_argument(unpacker& u, const value& x,
                                const c10::TypePtr& type);

/// Tells whether `x` is such a parameter.
bool is_shared_parameter(const c10::IValue& x);

/// Copies of lists, tuples and dictionaries with the same items.
c10::IValue shallow_copy(const c10::IValue& x);

/// Tells whether two values have the same structure and contain the same
/// tensors, by identity.
bool same_content(const c10::IValue& x, const c10::IValue& y);

/// Replaces the items of `x`, a shared list or dictionary, with those of `y`.
void replace_content(const c10::IValue& x, const c10::IValue& y);

} // namespace smp
