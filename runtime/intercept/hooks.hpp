#pragma once

#include "runtime/model/module_walk.hpp"

namespace smp {

/// Fills `walked_module::hooks`, where the calls of torch::nn modules ask for
/// their place, and puts the wrappers into what is a Sequential. Done once; a
/// second time it finds what is there.
void install_hooks(walked_model& model);

} // namespace smp
