#pragma once

// The file format "safetensors": 8 bytes length (little endian), a JSON header
// {name: {dtype, shape, data_offsets}}, then the raw bytes of all tensors.
// Python reads it with the package of that name.

#include "runtime/base/named_tensors.hpp"
#include "transport/files/file_descriptor.hpp"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
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

/// The same for tensors that are not all in memory at one time.
/// @param value takes a position in `tensors` and returns that tensor; called
///        once for each, in any order
void write_safetensors(const std::string& path,
                       const std::vector<tensor_outline>& tensors,
                       const std::function<at::Tensor(size_t)>& value,
                       const string_map& metadata = {});

/// @returns the format's name of a type: "F32"; empty if it has no such type
std::string dtype_in_file(c10::ScalarType x);

/// A file whose tensors are read one at a time.
class safetensors_reader {
public:
  /// Reads the header.
  /// @throws error (config) naming `path` and, if one is to blame, the tensor:
  ///         sizes, offsets, overlaps, holes, dtypes and shapes are all checked
  explicit safetensors_reader(const std::string& path);

  /// Of the open file.
  int descriptor() const noexcept {
    return file_.get();
  }

  /// In the order of the data.
  const std::vector<tensor_outline>& tensors() const noexcept {
    return tensors_;
  }

  /// The "__metadata__" of the header.
  const string_map& metadata() const noexcept {
    return metadata_;
  }

  /// @returns the position of the tensor called `name`, if there is one
  std::optional<size_t> find(const std::string& name) const;

  /// @param position in `tensors()`
  /// @throws error (config) naming the file
  at::Tensor read(size_t position) const;

  /// Reads rows along the first axis only, from row `begin` on.
  /// @pre the tensor has an axis, and these rows
  at::Tensor read_rows(size_t position, int64_t begin, int64_t rows) const;

  /// The same, into memory that has room for the rows.
  void read_rows(size_t position, int64_t begin, int64_t rows, void* to) const;

private:
  std::string path_;
  file_descriptor file_;
  std::vector<tensor_outline> tensors_;
  std::vector<uint64_t> begins_; // in the file
  std::map<std::string, size_t> positions_;
  string_map metadata_;
};

/// Reads the whole file.
/// @throws error (config) as `safetensors_reader` does
safetensors_file read_safetensors(const std::string& path);

} // namespace smp
