#pragma once

// A module that several ranks share, made of an ordinary one: that keeps its
// place in the model and its parameters, of which each rank holds a slice, and
// what it computes is computed by all of them together.

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

/// What a rank holds of a parameter: a range of one axis. Where several layers
/// stand in one, as query, key and value do, the axis consists of as many equal
/// blocks, and the rank holds the same range of each.
struct tensor_slice {
  int64_t dim = 0;
  /// In each block.
  int64_t begin = 0;
  int64_t length = 0;
  /// Sizes of the whole.
  std::vector<int64_t> whole = {};
  int64_t blocks = 1;

  /// @returns the slice of `x`, a view if there is one block
  at::Tensor of(const at::Tensor& x) const;

  /// @param parts of all ranks, in their order
  /// @returns the whole
  at::Tensor merged(const std::vector<at::Tensor>& parts) const;

  /// @returns the slice as ranges without blocks, one behind the other
  std::vector<tensor_slice> ranges() const;

  bool operator==(const tensor_slice&) const = default;
};

/// By the names of parameters in their module.
using parameter_slices = std::map<std::string, tensor_slice>;

/// An ordinary module, as torch::nn and TorchScript have it.
struct native_module {
  /// "Linear".
  std::string type;
  /// Its path in the model.
  std::string name = {};
  /// By their names in the module ("weight", "attn.c_attn.weight"). Of a
  /// TorchScript module what is undefined (no bias) is left out.
  std::map<std::string, at::Tensor> parameters = {};
  /// What it calls those that a module of its type calls otherwise: "kernel" by
  /// "weight".
  std::map<std::string, std::string> own_names = {};
  /// How it is shared; null if only its type tells.
  const distribution* how = nullptr;
  /// Why it may not be taken for what its type says; empty if it may.
  std::string doubt = {};
  /// Those of its options that are set and matter here.
  std::optional<int64_t> padding_idx = {};
  bool sparse = false;
  bool max_norm = false;
  bool scale_grad_by_freq = false;
  std::vector<int64_t> normalized_shape = {};
  double eps = 1e-5;
  /// Of an Embedding: its table is that of an LMHead, which is cut by rows.
  bool by_words = false;
  /// Of a transformer layer or a part of one, and only of these.
  std::shared_ptr<const transformer_layer_options> layer = {};
  /// Of a distributed module of a user, or an LMHead: its options.
  std::shared_ptr<const void> options = {};
  /// Ranks keep no activation twice, where that is a choice, rather than
  /// exchange less (smp.optimize).
  bool saves_memory = true;
};

/// Where a call stands among those of layers behind each other. What is between
/// two of them nobody else sees.
struct row_place {
  bool first = true;
  bool last = true;
};

/// Computes what the ordinary module would, for the samples of this rank. Peers
/// call it at the same time.
class distributed_module {
public:
  virtual ~distributed_module();

  /// @param xs the tensors in the arguments, [batch, ...] each, with the same
  /// sizes on all peers
  /// @returns the tensors in the result
  virtual std::vector<at::Tensor>
  forward(std::span<const at::Tensor> xs) const = 0;

  /// Tells whether others of which this is true, too, take hidden states as
  /// this one has them, and the reverse, so that nothing is exchanged between.
  virtual bool stands_in_rows() const noexcept {
    return false;
  }

  /// `forward` of one that stands in rows, with a place that peers agree on:
  /// behind another one, `xs[0]` is what that returned; before another one, the
  /// first tensor of the result is what that takes.
  virtual std::vector<at::Tensor> forward_in_row(std::span<const at::Tensor> xs,
                                                 const row_place& place) const;
};

/// @returns the tensor of a call of a module that takes one
/// @throws error (user_code) naming the module if there are others: it would
/// not look at them
const at::Tensor& only_tensor(const std::string& module,
                              std::span<const at::Tensor> xs);

/// How modules of one type are shared.
struct distribution {
  std::string_view type;
  /// Such modules are shared only where they are named themselves, as they have
  /// little of which others could hold a part.
  bool only_by_name = false;
  /// @returns why `x` cannot be shared by so many, and the way out; or nothing
  std::string (*refusal)(const native_module& x, int64_t peers);
  /// @returns what peer `rank` of so many holds of each parameter; of those
  /// that it does not name, each holds the whole
  parameter_slices (*slices)(const native_module& x, int64_t rank,
                             int64_t peers);
  /// @param x its parameters hold the slices by now
  std::unique_ptr<distributed_module> (*make)(const native_module& x,
                                              const parameter_slices& slices);
  /// @returns along what, where that depends on the module: "by rows"; or null
  const char* (*manner)(const native_module& x, int64_t peers) = nullptr;
  /// Where all peers have the same samples, the gradient of a slice counts them
  /// once; else it is the sum over what each peer had.
  bool counts_samples_once = true;
  /// Of a transformer layer, or of a part of one: more than the name of its
  /// class has to be told (`native_module::layer`).
  bool of_layer = false;
};

} // namespace smp
