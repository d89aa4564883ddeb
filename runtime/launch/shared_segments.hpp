#pragma once

// UCX's shared memory files: whether there is room, and their removal.

#include <cstdint>
#include <ctime>
#include <optional>
#include <string>

namespace smp {

/// @returns the folder of UCX's posix shared memory files
std::string shared_memory_folder();

/// UCX assumes that its pools can grow, and crashes when the file system is
/// full (in a container, 64 MB by default). A rank that uses shared memory and
/// one that does not cannot talk, so all ranks of a machine must come to the
/// same answer: our launcher checks before it starts them, and passes the
/// answer on. Other ranks each check for themselves, at different times, and
/// count memory that their own run has already taken as free.
/// @param ranks number of ranks on this machine
/// @param run_id run of the ranks that may have started; empty: none has
/// @returns why these files must not be used; nullopt if there is room
std::optional<std::string>
no_room_for_shared_memory(const std::string& folder, uint64_t ranks,
                          const std::string& run_id = {});

/// System V shared memory is in no file system: only kernel limits (shmmax,
/// shmall) forbid it, and a request that is too large fails at once.
/// @param ranks number of ranks on this machine
/// @returns whether there is room for all of them
bool system_v_has_room(uint64_t ranks);

/// @returns bytes in the file system of `folder` that ranks of the run hold as
/// shared memory of UCX
uint64_t held_by_run(const std::string& folder, const std::string& run_id);

/// A process killed after UCX created a file and before UCX unlinked it leaves
/// the file behind for ever. Removes such files of this user that are not older
/// than `since` and that no process has open or mapped.
void remove_dead_segments(const std::string& folder, std::time_t since);

/// Without our launcher, the ranks that are left clean up on their way out:
/// removes what a lost rank of this run may have left on this machine. Does
/// nothing in a rank of our launcher.
void remove_segments_of_lost_ranks();

} // namespace smp
