#pragma once

// A module that several ranks share, made of an ordinary one: that keeps its
// place in the model and its parameters, of which each rank holds a slice, and
// what it computes is computed by all of them together.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace smp {

/// What a rank holds of a parameter: a range of one axis.
struct tensor_slice {
  int64_t dim = 0;
  int64_t begin = 0;
  int64_t length = 0;
  /// Sizes of the whole.
  std::vector<int64_t> whole = {};

  /// @returns the slice of `x`, a view
  at::Tensor of(const at::Tensor& x) const;

  bool operator==(const tensor_slice&) const = default;
};

/// An ordinary module, as torch::nn and TorchScript have it.
struct native_module {
  /// "Linear".
  std::string type;
  /// By their names in the module. Of a TorchScript module what is undefined
  /// (no bias) is left out.
  std::map<std::string, at::Tensor> parameters = {};
  /// Why it may not be taken for what its type says; empty if it may.
  std::string doubt = {};
  /// Those of its options that are set and matter here.
  std::optional<int64_t> padding_idx = {};
  bool sparse = false;
  bool max_norm = false;
  bool scale_grad_by_freq = false;
};

/// Computes what the ordinary module would, from one tensor to one tensor, for
/// the samples of this rank. Peers call it at the same time.
class distributed_module {
public:
  virtual ~distributed_module();

  /// @param x [batch, ...], with the same sizes on all peers
  virtual at::Tensor forward(const at::Tensor& x) const = 0;
};

/// How modules of one type are shared.
struct distribution {
  std::string_view type;
  /// @returns why `x` cannot be shared by so many, and the way out; or nothing
  std::string (*refusal)(const native_module& x, int64_t peers);
  /// @returns what peer `rank` of so many holds of each parameter
  std::map<std::string, tensor_slice> (*slices)(const native_module& x,
                                                int64_t rank, int64_t peers);
  /// @param x its parameters hold the slices by now
  std::unique_ptr<distributed_module> (*make)(const native_module& x);
};

/// @returns null if there is none for this type
const distribution* find_distribution(std::string_view type);

} // namespace smp
