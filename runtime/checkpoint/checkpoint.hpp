#pragma once

// Checkpoints to resume from (docs/checkpoints.md): each rank writes what it
// holds, and any grid of ranks can read it.

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
  /// Data of the program, handed back when it resumes.
  std::map<std::string, std::string> user_content = {};
  /// How many checkpoints stay, this one included; 0: all.
  uint64_t num_kept_partial_checkpoints = 2;
  /// Settings for programs to compare before they resume.
  std::map<std::string, std::string> settings = {};
};

struct saved_checkpoint {
  std::string folder; // PATH/step-N
  uint64_t bytes = 0; // of all ranks
  double seconds = 0; // for which the run stood still
};

/// Writes parameters, buffers, optimizer state and the positions of the random
/// streams to PATH/step-`step`, a path that all ranks can access. Collective
/// over the world; between steps, after the partition. The checkpoint is valid
/// once everything is on disk; until then, whatever happens, the previous one
/// stays. Parameters that hold averages now (`swap_averages`) are saved as the
/// weights that the averages replaced.
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

/// Resumes from a checkpoint written by any grid of ranks: each rank reads what
/// it owns. Before the first step, values are loaded with the partition, which
/// is the checkpoint's if there are as many pipeline ranks; all checks run
/// immediately. Collective over the world.
/// @param path a folder of checkpoints, of which the newest complete one is
///        used, or one checkpoint
/// @param optimizers must outlive the first step
/// @param rehearse runs what the program runs before update `i`, from 0: its
///        steps with forward and backward. With `smp.deterministic_server` it
///        is called at once for the first few updates, and its effects are
///        discarded: it makes sums add in the order of the run that wrote the
///        checkpoint. The step of the checkpoint has to count updates
/// @returns nothing if there is no checkpoint
/// @throws error (config), the same on all ranks, before anything is changed:
///         naming the file that is damaged, missing or of another version, or
///         the tensors or options that do not fit
std::optional<resumed_checkpoint>
resume_from_checkpoint(const std::string& path, distributed_model_base& model,
                       const std::vector<distributed_optimizer*>& optimizers,
                       const std::function<void(uint64_t)>& rehearse = {});

} // namespace smp
