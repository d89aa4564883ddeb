#pragma once

#include <string>

namespace smp {

/// How to checkpoint the activations of a module, with the names of the paper's
/// interface.
struct activation_checkpointing {
  /// Which children of a Sequential on one rank are recomputed together: "each"
  /// by itself, "contiguous" for all consecutive ones, "group_2", "group_3",
  /// ... for groups of that size. Other modules have "each".
  std::string strategy = "each";
  /// True: a recomputation draws the random numbers of the first pass; false:
  /// different ones.
  bool preserve_rng_state = true;
  /// For source compatibility: a Sequential passes tuples from child to child,
  /// and smp unpacks and packs them whether or not this is set.
  bool pack_args_as_tuple = false;
};

/// @param sequential `x` applies to the children of a Sequential
/// @throws error (config) naming the invalid option
void check_checkpointing(const activation_checkpointing& x, bool sequential);

} // namespace smp
