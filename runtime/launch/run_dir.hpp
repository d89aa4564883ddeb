#pragma once

// The directory of a run, with its logs and everything else it leaves.

#include <string>
#include <vector>

namespace smp {

/// The output of an earlier run is never overwritten; incomplete files of a
/// killed run are removed. Call this before any rank of this run writes.
/// @param signs names of files: if none of them has content, `path` holds
/// nothing that anyone could miss
/// @throws error (config) naming what is in `path`, and what to do
void claim_run_dir(const std::string& path,
                   const std::vector<std::string>& signs);

/// Removes the files that our launcher leaves in `path`: logs, the last stall
/// report, the outcome of the run.
void remove_launcher_files(const std::string& path);

/// Creates `wanted`, or, if that is empty, a new directory runs/TIME-NAME
/// below the current one.
/// @returns the directory
/// @throws error (config) naming the directory and why it cannot be created
std::string make_run_dir(const std::string& wanted, const std::string& name);

} // namespace smp
