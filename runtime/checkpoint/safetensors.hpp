#pragma once

// The file format "safetensors": 8 bytes length (little endian), a JSON header
// {name: {dtype, shape, data_offsets}}, then the raw bytes of all tensors.
// Python reads it with the package of that name.

#include "runtime/base/named_tensors.hpp"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

namespace smp {

using string_map = std::map<std::string, std::string>;

struct safetensors_file {
  /// In the order of the data.
  named_tensors tensors;
  /// The "__metadata__" of the header.
  string_map metadata;

  /// @returns the tensor called `name`, or null.
  const at::Tensor* find(const std::string& name) const noexcept;
};

/// Writes `tensors` to `path`: a reader sees the old file or the whole new
/// one, never a part, also after a crash.
/// @throws error (config) naming `path` and, if one is to blame, the tensor:
///         duplicate name, dtype that the format lacks, errno of the system
void write_safetensors(const std::string& path, const named_tensors& tensors,
                       const string_map& metadata = {});

/// A tensor without its values.
struct tensor_outline {
  std::string name;
  c10::ScalarType dtype;
  std::vector<int64_t> shape;
};

/// The same, where not all tensors are in memory at one time.
/// @param value takes a position in `tensors` and returns that tensor; called
///        once for each, in any order
void write_safetensors(const std::string& path,
                       const std::vector<tensor_outline>& tensors,
                       const std::function<at::Tensor(size_t)>& value,
                       const string_map& metadata = {});

/// Reads the whole file.
/// @throws error (config) naming `path` and, if one is to blame, the tensor:
///         sizes, offsets, overlaps, holes, dtypes and shapes are all checked
safetensors_file read_safetensors(const std::string& path);

} // namespace smp
