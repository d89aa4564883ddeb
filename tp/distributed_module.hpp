#pragma once

// A module that several ranks share, made from an ordinary one. That one keeps
// its place in the model and its parameters, of which each rank holds a slice;
// its result is computed by all of these ranks together.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace smp {

struct distribution;
struct transformer_layer_options;

/// What a rank holds of a parameter: a range of one axis. If one parameter
/// combines several layers, such as query, key and value, the axis consists of
/// as many equal blocks, and the rank holds the same range of each.
struct tensor_slice {
  int64_t dim = 0;
  /// In each block.
  int64_t begin = 0;
  int64_t length = 0;
  /// Sizes of the whole parameter.
  std::vector<int64_t> whole = {};
  int64_t blocks = 1;

  /// @returns the slice of `x`, a view if there is one block
  at::Tensor of(const at::Tensor& x) const;

  /// @param parts of all ranks, in their order
  /// @returns the whole
  at::Tensor merged(const std::vector<at::Tensor>& parts) const;

  /// @returns the slice as consecutive ranges without blocks
  std::vector<tensor_slice> ranges() const;

  bool operator==(const tensor_slice&) const = default;
};

/// By the names of parameters in their module.
using parameter_slices = std::map<std::string, tensor_slice>;

/// An ordinary module, as torch::nn and TorchScript define it.
struct native_module {
  /// "Linear".
  std::string type;
  /// Its path in the model.
  std::string name = {};
  /// By name in the module ("weight", "attn.c_attn.weight"). Parameters of a
  /// TorchScript module that are undefined (no bias) are left out.
  std::map<std::string, at::Tensor> parameters = {};
  /// The module's own names of parameters that its type names otherwise:
  /// "kernel" by "weight".
  std::map<std::string, std::string> own_names = {};
  /// How it is shared; null if only its type determines that.
  const distribution* how = nullptr;
  /// Why it may not be what its type says; empty if there is no doubt.
  std::string doubt = {};
  /// The options that matter here, if they are set.
  std::optional<int64_t> padding_idx = {};
  bool sparse = false;
  std::optional<double> max_norm = {};
  double norm_type = 2;
  bool scale_grad_by_freq = false;
  std::vector<int64_t> normalized_shape = {};
  double eps = 1e-5;
  /// Of an Embedding: its table is that of an LMHead, which is split by rows.
  bool by_words = false;
  /// Set for a transformer layer or a part of one, and only for these.
  std::shared_ptr<const transformer_layer_options> layer = {};
  /// The options of a user's distributed module or of an LMHead.
  std::shared_ptr<const void> options = {};
  /// Where there is a choice, ranks keep no activation twice, rather than
  /// exchange less (smp.optimize).
  bool saves_memory = true;
};

/// The place of a call in a row of consecutive layers. No other module sees the
/// tensors between two of them.
struct row_place {
  bool first = true;
  bool last = true;
};

/// Computes what the ordinary module would, for the samples of this rank. All
/// peers call it at the same time.
class distributed_module {
public:
  virtual ~distributed_module();

  /// @param xs the tensors in the arguments, [batch, ...] each, with the same
  /// sizes on all peers
  /// @returns the tensors in the result
  virtual std::vector<at::Tensor>
  forward(std::span<const at::Tensor> xs) const = 0;

  /// Tells whether this module and others for which this is true pass hidden
  /// states to each other in their internal form, with no exchange in between.
  virtual bool stands_in_rows() const noexcept {
    return false;
  }

  /// `forward` of a module that stands in rows, at a place that peers agree on:
  /// unless first, `xs[0]` is the result of the previous one; unless last, the
  /// first tensor of the result is the input of the next one.
  virtual std::vector<at::Tensor> forward_in_row(std::span<const at::Tensor> xs,
                                                 const row_place& place) const;
};

/// @returns the tensor of a call of a module that takes only one
/// @throws error (user_code) naming the module if there are others, which it
/// would ignore
const at::Tensor& only_tensor(const std::string& module,
                              std::span<const at::Tensor> xs);

/// How modules of one type are shared.
struct distribution {
  std::string_view type;
  /// Such modules are shared only if they are named themselves, because they
  /// have little that can be split.
  bool only_by_name = false;
  /// @returns why `x` cannot be shared by `peers`, and the way out; or nothing
  std::string (*refusal)(const native_module& x, int64_t peers);
  /// @returns the slices that peer `rank` of `peers` holds; of a parameter that
  /// is not named, each peer holds the whole
  parameter_slices (*slices)(const native_module& x, int64_t rank,
                             int64_t peers);
  /// @param x its parameters already hold the slices
  std::unique_ptr<distributed_module> (*make)(const native_module& x,
                                              const parameter_slices& slices);
  /// @returns how it is split, where that varies: "by rows"; or null
  const char* (*manner)(const native_module& x, int64_t peers) = nullptr;
  /// If all peers have the same samples, the gradient of a slice counts them
  /// once; else it is the sum over what each peer had.
  bool counts_samples_once = true;
  /// For a transformer layer or a part of one: the name of its class is not
  /// enough, its options are needed, too (`native_module::layer`).
  bool of_layer = false;
  /// If ranks do not share the module as a whole, they may share parts of it.
  bool parts_too = true;
};

} // namespace smp
