#pragma once

#include "runtime/train/trainable.hpp"

#include <memory>
#include <string>

namespace smp {

/// A TorchScript file as `trainable`: its forward takes the tensors of a batch
/// in their order and returns the scalar loss, or a tuple that begins with it.
/// The model starts in training mode, whatever it was exported in.
/// @throws error (config) naming the file and how to export it correctly
std::unique_ptr<trainable> make_script_trainable(const std::string& path);

} // namespace smp
