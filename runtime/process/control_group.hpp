#pragma once

// What the control group (cgroup) of this process allows: that of a container,
// a batch job or a service.

#include <cstdint>
#include <optional>
#include <string>

namespace smp {

/// Limits of the group and of those above it, the least of each.
struct control_group {
  /// In bytes, of all processes in it together; nothing: no limit.
  std::optional<uint64_t> memory;
  /// How much of it is free, in bytes, where there is a limit: memory that only
  /// holds files that were read counts as free.
  std::optional<uint64_t> free_memory;
  /// CPU time per time, of all its processes together; nothing: no limit.
  std::optional<double> cpus;
  /// How many of its processes were killed for lack of memory; nothing: the
  /// kernel does not tell.
  std::optional<uint64_t> oom_kills;
};

/// Where Linux shows control groups.
struct control_group_files {
  /// The root of the hierarchies, version 2, 1 or both.
  std::string root = "/sys/fs/cgroup";
  /// The groups of a process.
  std::string own = "/proc/self/cgroup";
};

control_group read_control_group(const control_group_files& x = {});

/// @param meminfo where Linux tells what is free of the whole machine
/// @returns memory in bytes that the processes of the group may still take;
/// nothing if the system does not tell
std::optional<uint64_t>
memory_left(const control_group& x,
            const std::string& meminfo = "/proc/meminfo");

/// @returns how many threads `n` processes of the group may have each so that
/// all together use no more than its CPU time, at least 1; nothing: as many as
/// they like
std::optional<uint64_t> share_of_cpus(const control_group& x, uint64_t n);

/// @param before, now the same group, before a process was killed and after
/// @returns ", as ..." if it was for lack of memory; else empty
std::string why_killed(const control_group& before, const control_group& now);

} // namespace smp
