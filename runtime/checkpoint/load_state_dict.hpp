#pragma once

#include "runtime/session/distributed_model.hpp"

#include <string>
#include <vector>

namespace smp {

class distributed_optimizer;

/// Reads parameters and buffers from a file (safetensors.hpp), or from several
/// with an index (weight_files.hpp). The files hold whole tensors under the
/// names of the model, as `distributed_model::load_state_dict` takes them from
/// memory. Each rank reads what it owns, one tensor at a time, so no rank needs
/// memory for the whole. Before the partition this only compares the file with
/// the model; values load with the partition, and the file has to exist until
/// then. Collective over the world.
/// @param path the file, the index, or the folder with either
/// @param optimizers of the model, alive until the partition: their float32
/// weights of parameters in half precision get the values of the file.
/// Optimizers not listed take theirs from the parameters, which are rounded.
/// @param prefix with which the names in the file begin and those of the model
/// do not; see also weight_names.hpp
/// @throws error (config), the same on all ranks, naming the file and all that
/// is missing, unknown or of another shape, before anything is changed
void load_state_dict(const std::string& path, distributed_model_base& model,
                     const std::vector<distributed_optimizer*>& optimizers = {},
                     const std::string& prefix = {});

/// Only compares, on this rank.
/// @throws error (config) as `load_state_dict`
void check_state_dict(const std::string& path,
                      const distributed_model_base& model,
                      const std::string& prefix = {});

} // namespace smp
