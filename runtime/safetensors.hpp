#pragma once

// The file format "safetensors": 8 bytes length (little endian), a JSON header
// {name: {dtype, shape, data_offsets}}, then the raw bytes of all tensors.
// Python reads it with the package of that name.

#include "runtime/named_tensors.hpp"

#include <map>
#include <string>

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

/// Reads the whole file.
/// @throws error (config) naming `path` and, if one is to blame, the tensor:
///         sizes, offsets, overlaps, holes, dtypes and shapes are all checked
safetensors_file read_safetensors(const std::string& path);

} // namespace smp
