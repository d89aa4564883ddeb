#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <optional>

// Operators that make memory or change what a tensor looks at, with their
// schemas' signatures.

namespace smp::sim {

/// Keeps what fits, in the order of the current stream.
void resize_storage(const c10::Storage&, size_t bytes);

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType>,
                 std::optional<at::Layout>, std::optional<at::Device>,
                 std::optional<bool> pin, std::optional<at::MemoryFormat>);

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride,
                         std::optional<at::ScalarType>,
                         std::optional<at::Layout>, std::optional<at::Device>,
                         std::optional<bool> pin);

const at::Tensor& resize_(const at::Tensor&, at::IntArrayRef size,
                          std::optional<at::MemoryFormat>);

at::Tensor& set_storage_and_shape(at::Tensor&, at::Storage, int64_t offset,
                                  at::IntArrayRef size, at::IntArrayRef stride);

at::Tensor& set_storage(at::Tensor&, at::Storage);

at::Tensor& set_tensor(at::Tensor&, const at::Tensor& source);

at::Tensor& set_nothing(at::Tensor&);

void record_stream(at::Tensor&, c10::Stream);

/// Whether `set_data` may put one in the place of the other: without this,
/// torch::nn::Module::to fails.
bool has_compatible_type(const at::Tensor&, const at::Tensor&);

} // namespace smp::sim
