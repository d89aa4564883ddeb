#pragma once

// Checkpoints to go on from (docs/checkpoints.md): each rank writes what it
// holds, and any grid of ranks reads it.

#include "runtime/session/distributed_model.hpp"

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace smp {

class distributed_optimizer;

struct checkpoint_options {
  /// Whatever the program wants back when it goes on.
  std::map<std::string, std::string> user_content = {};
  /// This one and those before it that stay; 0: all.
  uint64_t num_kept_partial_checkpoints = 2;
  /// For who compares them before it goes on.
  std::map<std::string, std::string> settings = {};
};

struct saved_checkpoint {
  std::string folder; // PATH/step-N
  uint64_t bytes = 0; // of all ranks
  double seconds = 0; // that the run stood still
};

/// Writes parameters, buffers, what optimizers remember, and where streams of
/// random numbers stand to PATH/step-`step`, which all ranks reach under this
/// name. Collective over the world; between steps, after the partition. The
/// checkpoint counts once everything is on disk; until then, and whatever
/// happens, the one before it stays. Parameters that are averages now
/// (`swap_averages`) are saved as the weights that they were.
/// @param optimizers of the model, in the order in which they are resumed
/// @throws error (config), the same on all ranks, naming the file, the rank and
///         what is wrong: no space, not writable; or the checkpoint of a
///         later step that the folder holds
saved_checkpoint
save_checkpoint(const std::string& path, uint64_t step,
                const distributed_model_base& model,
                const std::vector<distributed_optimizer*>& optimizers,
                const checkpoint_options& x = {});

struct resumed_checkpoint {
  std::string folder;
  uint64_t step = 0;
  std::map<std::string, std::string> user_content;
};

/// Goes on from a checkpoint that any grid of ranks wrote: each rank reads what
/// it owns. Before the first step the values come with the partition, which is
/// that of the checkpoint if there are as many pipeline ranks; all checks are
/// made at once. Collective over the world.
/// @param path of a folder of checkpoints (the newest complete one counts), or
///        of one checkpoint
/// @param optimizers must outlive the first step
/// @param rehearse does what the program does before update `i`, from 0: its
///        steps with forward and backward. With `smp.deterministic_server` it
///        is called for the first few at once, and nothing of it stays: so
///        sums are added in the order of the run that wrote the checkpoint.
///        The step of the checkpoint has to count updates
/// @returns nothing if there is none
/// @throws error (config), the same on all ranks, before anything is changed:
///         naming the file that is damaged, missing or of another version, or
///         the tensors or options that do not fit
std::optional<resumed_checkpoint>
resume_from_checkpoint(const std::string& path, distributed_model_base& model,
                       const std::vector<distributed_optimizer*>& optimizers,
                       const std::function<void(uint64_t)>& rehearse = {});

} // namespace smp
