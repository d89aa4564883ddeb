#pragma once

#include "runtime/offload/offload_store.hpp"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace smp {

/// Tensors that keep their sizes and versions while their bytes are elsewhere.
class offloaded_tensors {
public:
  /// Takes the bytes of those `xs` for which it is worth it. What is small
  /// stays, what is no plain tensor, and a view with more gaps than bytes.
  /// @param lane see `offload_store`
  /// @param xs nobody else has these tensors, but perhaps their bytes
  /// @returns null if all stay
  static std::unique_ptr<offloaded_tensors>
  take(offload_store& store, uint64_t lane, const std::vector<at::Tensor>& xs);

  /// Waits for the bytes, and gives them to the tensors. Once only.
  /// @throws error, see `offload_store::set::take`
  void put_back();

private:
  std::vector<at::Tensor> tensors_;
  std::unique_ptr<offload_store::set> bytes_;
};

/// Makes `x` forget its content, of which it keeps the sizes: for a tensor that
/// only stands for its place in an autograd graph. @pre nobody reads it again
void drop_content(const at::Tensor& x);

} // namespace smp
