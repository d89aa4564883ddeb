#pragma once

#include "runtime/model/module_walk.hpp"

namespace smp {

/// Fills `walked_module::hooks`, where calls of torch::nn modules look up where
/// they run, and wraps the children of Sequentials. Idempotent: a second call
/// finds what exists.
void install_hooks(walked_model& model);

} // namespace smp
