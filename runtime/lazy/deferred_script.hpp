#pragma once

#include <torch/csrc/jit/api/module.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

namespace smp {

/// Loads a TorchScript file as `torch::jit::load` does, on the CPU, but large
/// parameters, buffers and tensors in attributes are deferred
/// (deferred_init.hpp): their bytes are read from the file when they are made,
/// those of other ranks never. Tensors that share memory will share it.
/// Constants of the code are read at once, and so is the whole of a file that
/// runs code on tensors while it is loaded (quantised modules). The file must
/// not change until the tensors are made.
/// @param at_least bytes from which on a tensor is large
torch::jit::Module load_deferred_script(const std::string& path,
                                        size_t at_least = 4096);

/// Gives `f` the rows of a deferred tensor of such a file, the first one's
/// position and [any, ...], one piece after the other. A piece is gone when `f`
/// returns, and the tensor stays deferred.
/// @returns false, having done nothing, if `x` is not a whole tensor as it
/// stands in a file
/// @throws error (config) if the file is not what it was
bool read_rows(const at::Tensor& x,
               const std::function<void(int64_t, const at::Tensor&)>& f);

} // namespace smp
