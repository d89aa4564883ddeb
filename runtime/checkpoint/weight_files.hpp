#pragma once

// The tensors of a model in files: in one, or in several with an index, as
// Hugging Face's save_pretrained writes large models.

#include "runtime/checkpoint/safetensors.hpp"

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace smp {

/// All files of a model, read as a `safetensors_reader` reads one.
class weight_files {
public:
  /// Reads the headers.
  /// @param path a safetensors file; an index (NAME.json), whose `weight_map`
  ///        has for each tensor the name of the file beside it; or a folder
  ///        with model.safetensors or model.safetensors.index.json
  /// @throws error (config) naming the file and what is wrong with it
  explicit weight_files(const std::string& path);

  /// File by file, in the order of the data in each. With an index, only the
  /// tensors that the index assigns to the file.
  const std::vector<tensor_outline>& tensors() const noexcept {
    return tensors_;
  }

  /// @param position in `tensors()`
  /// @throws error (config) naming the file
  at::Tensor read(size_t position) const;

  /// See `safetensors_reader::read_rows`.
  at::Tensor read_rows(size_t position, int64_t begin, int64_t rows) const;

private:
  struct place {
    size_t file;
    size_t position; // there
  };

  void add_one(const std::string& path);
  void add_indexed(const std::string& index);

  /// Adds a tensor of the last file.
  void add_tensor(size_t position);

  std::vector<safetensors_reader> files_;
  std::vector<tensor_outline> tensors_;
  std::vector<place> places_;
};

} // namespace smp
