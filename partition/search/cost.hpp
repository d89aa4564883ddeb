#pragma once

// Cost of a node (paper, appendix "Cost function").

#include "partition/module_tree.hpp"

namespace smp {

/// A cost, exact up to one factor common to the whole tree. Floating point
/// would break ties by rounding errors, which differ between machines.
__extension__ typedef unsigned __int128 exact_cost;

/// Parameters and seconds cannot be added, and one would dwarf the other. So
/// each is divided by its total first: own cost of a node =
/// alpha * memory / sum(memory) + (1 - alpha) * compute / sum(compute).
class cost_table {
public:
  /// @param memory_weight alpha, rounded to millionths.
  /// @throws error (config) if `memory_weight` is not in [0, 1] or a module has
  ///         a negative or infinite cost.
  cost_table(const model_info& model, const module_tree& tree,
             double memory_weight);

  /// Cost of the node's own modules.
  exact_cost own(size_t node) const {
    return own_[node];
  }

  /// Cost of the node and all nodes below it.
  exact_cost subtree(size_t node) const {
    return subtree_[node];
  }

  exact_cost total() const {
    return subtree_[0];
  }

  /// @returns `x` as a share of the whole model, 0 if the model costs nothing.
  double share(exact_cost x) const;

private:
  std::vector<exact_cost> own_;
  std::vector<exact_cost> subtree_;
};

/// Own memory of a module in elements: its parameters (a shared one counts for
/// each module that owns it) and measured activations.
double own_memory(const module_info& x);

/// @returns own compute cost of each module: as measured, or 1 each if nothing
///          was measured.
std::vector<double> own_compute(const model_info& model);

/// @returns integers in the ratio of `xs` whose sum is below 2^48: exact if
///          they have at most nine decimals and fit, otherwise rounded.
std::vector<uint64_t> to_integers(const std::vector<double>& xs);

} // namespace smp
