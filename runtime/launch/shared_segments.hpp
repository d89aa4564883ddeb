#pragma once

// Shared memory that UCX makes as files, and what becomes of it.

#include <cstdint>
#include <ctime>
#include <optional>
#include <string>

namespace smp {

/// @returns where UCX makes the files of posix shared memory
std::string shared_memory_folder();

/// UCX believes that its pools can grow, and crashes where the file system is
/// full (in a container, 64 MB by default). Ranks of which one uses shared
/// memory and another does not cannot talk, so all of a machine must come to
/// the same: our launcher asks before it starts them, and tells; others ask
/// each for itself, at another moment, and count as free what their own run has
/// taken by then.
/// @param ranks of this machine
/// @param run_id of the ranks that may have begun; empty: none has
/// @returns why these files are not to be used; nothing if there is room
std::optional<std::string>
no_room_for_shared_memory(const std::string& folder, uint64_t ranks,
                          const std::string& run_id = {});

/// Shared memory of System V is in no file system: only limits of the kernel
/// (shmmax, shmall) forbid it, and who asks for too much is told so at once.
/// @param ranks of this machine
/// @returns whether all of them can have it
bool system_v_has_room(uint64_t ranks);

/// @returns bytes in the file system of `folder` that ranks of the run hold as
/// shared memory of UCX
uint64_t held_by_run(const std::string& folder, const std::string& run_id);

/// A process that is killed just when UCX made a file, before that is unlinked,
/// leaves it behind for ever. Removes those of this user that are not older
/// than `since` and that no process has open or mapped.
void remove_dead_segments(const std::string& folder, std::time_t since);

/// Where no launcher of ours looks after the ranks, those that are left do, on
/// their way out: removes what a rank of this run may have left behind on this
/// machine. Does nothing in a rank of our launcher.
void remove_segments_of_lost_ranks();

} // namespace smp
