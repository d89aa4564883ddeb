#pragma once

#include "runtime/session/distributed_model.hpp"

#include <string>

namespace smp {

/// Reads parameters and buffers from a file (safetensors.hpp) that has whole
/// tensors under the names of the model, as
/// `distributed_model::load_state_dict` takes them from memory. Each rank reads
/// what it owns, one tensor after the other, so none needs the memory of the
/// whole. Before the partition this only compares the file with the model; the
/// values come with the partition, and the file has to stay until then.
/// Collective over the world.
/// @throws error (config), the same on all ranks, naming the file and all that
/// is missing, unknown or of another shape, before anything is changed
void load_state_dict(const std::string& path, distributed_model_base& model);

} // namespace smp
