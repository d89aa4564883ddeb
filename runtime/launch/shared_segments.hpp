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
/// full (in a container, 64 MB by default).
/// @param ranks of this machine
/// @returns why shared memory is not to be used; nothing if there is room
std::optional<std::string> no_room_for_shared_memory(const std::string& folder,
                                                     uint64_t ranks);

/// A process that is killed just when UCX made a file, before that is unlinked,
/// leaves it behind for ever. Removes those of this user that are not older
/// than `since` and that no process has open or mapped.
void remove_dead_segments(const std::string& folder, std::time_t since);

/// Where no launcher of ours looks after the ranks, those that are left do, on
/// their way out: removes what a rank of this run may have left behind on this
/// machine. Does nothing in a rank of our launcher.
void remove_segments_of_lost_ranks();

} // namespace smp
