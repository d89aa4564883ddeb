#pragma once

#include "runtime/session/distributed_model.hpp"

#include <string>

namespace smp {

/// Writes all parameters and buffers of a model, or all gradients, as
/// `state_dict` and `gradients` return them, to one file (safetensors.hpp) on
/// pp_rank 0 of the first replica. Owners send one tensor at a time, so no
/// rank needs more memory than for the largest. Collective over the pipeline
/// group.
/// @throws error (config) naming the file and what is wrong with it
void save_state(const std::string& path, const distributed_model_base& model);
void save_gradients(const std::string& path,
                    const distributed_model_base& model);

} // namespace smp
