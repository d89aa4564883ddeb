#pragma once

#include "runtime/offload/offload_store.hpp"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace smp {

/// Tensors whose bytes are in an `offload_store`. They keep their sizes and
/// versions.
class offloaded_tensors {
public:
  /// Moves the bytes of `xs` into `store`, except for small tensors, views that
  /// have more gaps than bytes, and what is not an ordinary tensor in memory
  /// that the store takes.
  /// @param lane see `offload_store`
  /// @param xs must not be used elsewhere; other tensors may share their memory
  /// @returns null if no tensor was moved
  static std::unique_ptr<offloaded_tensors>
  take(offload_store& store, uint64_t lane, const std::vector<at::Tensor>& xs);

  /// Waits for the bytes and gives them back to the tensors, for what is
  /// launched from now on. May be called once.
  /// @throws error, see `offload_store::set::take`
  void put_back();

private:
  std::vector<at::Tensor> tensors_;
  std::unique_ptr<offload_store::set> bytes_;
};

/// Frees the content of `x`, which keeps its sizes, for a tensor that is only
/// needed for its place in an autograd graph. @pre its values are not read
/// again
void drop_content(const at::Tensor& x);

} // namespace smp
