#pragma once

#include <torch/csrc/jit/api/module.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

namespace smp {

/// Loads a TorchScript file on the CPU as `torch::jit::load` does, but defers
/// large parameters, buffers and tensors in attributes (deferred_init.hpp):
/// their bytes are read from the file when they are needed, and those of other
/// ranks never. Tensors that share memory still share it then. Constants of the
/// code are read at once, and so is the whole of a file that runs code on
/// tensors while it is loaded (quantised modules). The file must not change
/// until all tensors have their bytes.
/// @param at_least size in bytes from which a tensor counts as large
torch::jit::Module load_deferred_script(const std::string& path,
                                        size_t at_least = 4096);

/// Passes the rows of a deferred tensor of such a file to `f`, one piece after
/// the other: the position of the first row, and a tensor of [any, ...]. A
/// piece is invalid once `f` returns, and the tensor stays deferred.
/// @returns false, having done nothing, if `x` is not one
/// whole tensor of a file
/// @throws error (config) if the file has changed
bool read_rows(const at::Tensor& x,
               const std::function<void(int64_t, const at::Tensor&)>& f);

} // namespace smp
