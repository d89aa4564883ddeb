#pragma once

// Builds the tree that is partitioned from the modules of a model (paper,
// appendix "Tree construction").

#include "transport/ids.hpp"

#include <map>
#include <optional>
#include <string>
#include <vector>

namespace smp {

// -- input: the modules as the walk found them --------------------------------

/// A parameter or buffer. Two modules that list the same id share it.
struct tensor_info {
  uint64_t id = 0;
  std::string name; // path in the model, e.g. "blocks.0.mlp.weight"
  uint64_t elements = 0;
};

/// One module object; an object with several names is one module (R17).
struct module_info {
  std::string path; // "" is the root
  std::string type;

  /// Positions in the model, in execution order if known, otherwise in
  /// registration order. A module may be the child of several parents.
  std::vector<module_id> children;

  /// Parameters and buffers that belong to the module itself, not to a child.
  std::vector<tensor_info> parameters;
  std::vector<tensor_info> buffers;

  /// Why calls of the module cannot be intercepted, and the one-line change
  /// that would allow it (R20); empty if they can.
  std::string not_interceptable;

  /// The whole that its parent computes with it, which keeps it there ("'h.0',
  /// which ranks share as a whole"); empty if it may go anywhere.
  std::string part_of;

  /// Modules that call it with what cannot be sent, and why.
  std::map<module_id, std::string> stays_with;

  /// Why microbatches pass the module in order, e.g. "buffer running_mean"
  /// (R19); empty if they need not.
  std::string ordered;

  /// Manual placement; applies to the whole subtree unless pinned otherwise.
  std::optional<uint32_t> pinned_device;

  /// Calls its children one after the other: one request per run of children on
  /// one device (R8). Other modules cause one request per child.
  bool sequential = false;

  /// A list or dictionary: is never called itself; its children are called by
  /// its parent's code. Ignored if `sequential`.
  bool container = false;

  /// Own memory besides parameters, in elements: the peak of temporary values
  /// measured by tracing.
  double activations = 0;

  /// Own forward time, in any unit that is the same for all modules. If any
  /// module lacks it, each has compute cost 1 (the paper's stand-in for time is
  /// the number of descendants; this counts each module once).
  std::optional<double> compute;

  /// Bytes of inputs and outputs of one call.
  uint64_t call_bytes = 0;

  /// Calls per microbatch.
  uint64_t calls = 1;

  // How its caller uses its results, which matters if calls do not wait by
  // themselves (`smp.fast_mode`):

  /// The caller waits for them: it computes with them before it calls another
  /// module, or these calls always wait.
  bool waited_for = false;

  /// It changes its state, so its calls wait, and so do calls of every module
  /// that calls it.
  bool keeps_state = false;

  /// The caller returns them unchanged.
  bool passed_on = false;

  /// The caller adds them to results of these modules. The sum is done where
  /// both are, if that is one device; otherwise the caller waits.
  std::vector<module_id> added_to;
};

/// All modules of a model in the order of their ids; the root comes first.
using model_info = std::vector<module_info>;

// -- output: the tree of module nodes -----------------------------------------

/// Why a module is not a node of its own.
struct merge_reason {
  enum class kind : uint8_t {
    shared_parameter,
    shared_buffer,
    not_interceptable,
    unsendable,
  };
  kind what = kind::shared_parameter;
  module_id module;
  module_id with;
  std::string text; // name of the tensor, or why it cannot be elsewhere

  bool is_shared() const noexcept {
    return what <= kind::shared_buffer;
  }
};

/// Modules that can only be placed together.
struct module_node {
  /// In preorder of the model; the first one names the node.
  std::vector<module_id> modules;
  size_t parent = 0; // the root's parent is the root
  std::vector<size_t> children;
  /// The subtree is the range [own index, subtree_end).
  size_t subtree_end = 0;
  /// Number of elements of its parameters; shared ones count once.
  uint64_t parameters = 0;
};

/// Modules that share a parameter or buffer must be on one device, and so must
/// a module and a child whose calls cannot be intercepted, and a module and a
/// caller that pass what cannot be sent: each connected component is a node.
/// The rest need not be a tree: extra parents are pruned breadth first, the
/// first one wins. Nodes are in preorder.
class module_tree {
public:
  /// @throws error (config) if `model` is empty, names a child that does not
  ///         exist, or has a module that the root does not reach.
  explicit module_tree(const model_info& model);

  size_t size() const noexcept {
    return nodes_.size();
  }

  const module_node& operator[](size_t i) const {
    return nodes_[i];
  }

  const std::vector<module_node>& nodes() const noexcept {
    return nodes_;
  }

  size_t node_of(module_id x) const {
    return node_of_[x.value];
  }

  /// One entry for each module that was merged into the node of another.
  const std::vector<merge_reason>& merges() const noexcept {
    return merges_;
  }

private:
  std::vector<module_node> nodes_;
  std::vector<size_t> node_of_;
  std::vector<merge_reason> merges_;
};

} // namespace smp
