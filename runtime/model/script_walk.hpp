#pragma once

#include "runtime/model/module_walk.hpp"

#include <ATen/core/ivalue.h>

#include <functional>
#include <vector>

namespace smp {

/// A TorchScript module as TorchScript itself holds it.
using script_object = c10::intrusive_ptr<c10::ivalue::Object>;

/// Walks a TorchScript model by object identity: modules in pre-order, tensors
/// in three passes (parameters, buffers, then what other attributes hold, also
/// in lists, dictionaries, tuples and script objects), so that first names and
/// their order are those of Python's `named_parameters`.
walked_model walk(const script_object& root);

/// @returns the TorchScript classes of the model's modules, each once, in walk
/// order
std::vector<c10::ClassTypePtr> classes_of(const walked_model& x);

/// The flag that train() and eval() set; true if the module has none.
bool is_training(const c10::ivalue::Object& x);

/// Sets training or evaluation mode of a module and all below it.
void set_training(c10::ivalue::Object& x, bool on);

} // namespace smp
