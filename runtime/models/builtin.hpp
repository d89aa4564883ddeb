#pragma once

// The models that smp brings along, as a configuration names them.

#include "runtime/config_file.hpp"
#include "runtime/models/gpt.hpp"

#include <memory>

namespace smp {

class trainable;

/// @throws error (config) naming a size that makes no sense, or `model.type`
/// if there is no such model
std::unique_ptr<trainable> make_builtin(const train_config& x);

/// @returns the sizes that `x` gives a "gpt"
gpt_config make_gpt_config(const train_config& x);

} // namespace smp
