#pragma once

#include <string>

namespace smp {

/// How activations of a module are checkpointed, with the names of the paper's
/// interface.
struct activation_checkpointing {
  /// How many children of a Sequential that stand on one rank are computed
  /// again together: "each" for itself, "contiguous" for all that follow each
  /// other, "group_2", "group_3", ... for so many. Others have "each".
  std::string strategy = "each";
  /// What is computed again draws the random numbers of the first time; else
  /// others.
  bool preserve_rng_state = true;
  /// A Sequential passes tuples from child to child. They are taken apart and
  /// put together without this word, which is here for code that has it.
  bool pack_args_as_tuple = false;
};

/// @param sequential it is for the children of a Sequential
/// @throws error (config) naming the option that does not fit
void check_checkpointing(const activation_checkpointing& x, bool sequential);

} // namespace smp
