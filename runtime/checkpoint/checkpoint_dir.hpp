#pragma once

// Checkpoints in a folder: DIR/step-N, each complete once it has its manifest,
// which comes last. Who dies while one is written leaves one without, which
// nobody loads and the next one that is written removes. Knows no session.

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

/// @returns the complete ones, oldest first; none if there is no such folder
std::vector<checkpoint_place> complete_checkpoints(const std::string& dir);

/// @param path of a checkpoint, or of a folder of checkpoints
/// @returns the checkpoint, or the newest complete one in it
std::optional<checkpoint_place> newest_checkpoint(const std::string& path);

/// @returns the path of the manifest of a checkpoint
std::string manifest_path(const std::string& folder);

/// Whoever goes on takes the newest one, so one that is saved beside it from an
/// older one would count for nothing.
/// @throws error (config) if `dir` holds a complete one of a later step
void refuse_newer(const std::string& dir, uint64_t step);

/// Makes an empty folder for a checkpoint, in `dir`, which is made as well.
/// @throws error (config) naming it
checkpoint_place begin_checkpoint(const std::string& dir, uint64_t step);

/// Makes a checkpoint complete: all its other files are on disk.
/// @throws error (config) naming the manifest
void commit_checkpoint(const checkpoint_place& x, const std::string& manifest);

/// Removes it as far as it goes: first its manifest, then what else smp wrote
/// there.
void remove_checkpoint(const std::string& folder) noexcept;

/// Removes what is older than `newest`, but for the `keep` - 1 complete ones
/// before it, and what others did not complete.
/// @param keep 0: all complete ones
void remove_old_checkpoints(const std::string& dir,
                            const checkpoint_place& newest, uint64_t keep);

/// Tells what a user may do about a checkpoint that cannot be loaded: ";
/// without this folder, DIR/step-10 is the newest".
std::string way_around(const std::string& folder);

} // namespace smp
