#pragma once

#include "runtime/train/trainable.hpp"

#include <memory>
#include <string>
#include <vector>

namespace smp {

/// A TorchScript file as `trainable`: its forward takes the tensors of a batch
/// in their order and returns the scalar loss, or a tuple that begins with it.
/// The model starts in training mode, whatever it was exported in.
/// @param libraries with operators that the file uses; they stay loaded
/// @throws error (config) naming the file and how to export it correctly, or a
///         library that cannot be loaded
std::unique_ptr<trainable>
make_script_trainable(const std::string& path,
                      const std::vector<std::string>& libraries = {});

} // namespace smp
