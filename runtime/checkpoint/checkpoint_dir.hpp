#pragma once

// Checkpoints in a folder: DIR/step-N. The manifest is written last and makes a
// checkpoint complete. A process that dies before leaves one without a
// manifest, which is never loaded; the next save removes it. Knows no session.

#include <compare>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace smp {

struct checkpoint_place {
  uint64_t step = 0;
  /// A step that is saved again gets a folder beside the first one: N-2, N-3.
  uint64_t attempt = 1;
  std::string folder = {}; // "DIR/step-N"

  auto operator<=>(const checkpoint_place&) const = default;
};

/// @returns the complete checkpoints, oldest first; none without such a folder
/// @throws error (config) naming the folder that cannot be read
std::vector<checkpoint_place> complete_checkpoints(const std::string& dir);

/// @param path of a checkpoint, or of a folder of checkpoints
/// @returns the checkpoint, or the newest complete one in it
/// @throws error (config) naming the folder that cannot be read
std::optional<checkpoint_place> newest_checkpoint(const std::string& path);

/// @returns the path of the manifest of a checkpoint
std::string manifest_path(const std::string& folder);

/// @throws error (config) if a checkpoint of another step has the name of this
///         folder: it was renamed, and would be taken for the newest
void refuse_wrong_step(const std::string& folder, uint64_t step);

/// Refuses to save beside a later checkpoint: a resuming run takes the newest
/// one, so the one saved here would never be used.
/// @throws error (config) if `dir` holds a complete checkpoint of a later step,
///         or cannot be read
void refuse_newer(const std::string& dir, uint64_t step);

/// Makes an empty folder for a checkpoint in `dir`; makes `dir` if necessary.
/// @throws error (config) naming it
checkpoint_place begin_checkpoint(const std::string& dir, uint64_t step);

/// Makes a checkpoint complete. @pre all its other files are on disk
/// @throws error (config) naming the manifest
void commit_checkpoint(const checkpoint_place& x, const std::string& manifest);

/// Removes as much of a checkpoint as it can: first the manifest, then the
/// other files that smp wrote. Nothing if the folder is a symbolic link.
void remove_checkpoint(const std::string& folder) noexcept;

/// Removes checkpoints older than `newest`: incomplete ones, and all complete
/// ones except the last `keep` - 1.
/// @param keep 0: all complete ones
void remove_old_checkpoints(const std::string& dir,
                            const checkpoint_place& newest, uint64_t keep);

/// @returns a hint for the user whose checkpoint cannot be loaded: "; without
/// this folder, DIR/step-10 is the newest".
std::string way_around(const std::string& folder);

} // namespace smp
