#pragma once

// The directory of a run, where its logs are and whatever else it leaves.

#include <string>
#include <vector>

namespace smp {

/// What a run left is never overwritten. What a run that was killed had not
/// written whole is removed. Before any rank of this run writes.
/// @param signs files: where none of them has content, there is nothing in
///        `path` that somebody could miss
/// @throws error (config) naming what is in `path`, and what to do
void claim_run_dir(const std::string& path,
                   const std::vector<std::string>& signs);

/// Removes what our launcher leaves in `path`: logs, the last stall, the end of
/// the run.
void remove_launcher_files(const std::string& path);

/// Makes `wanted`, or, if that is empty, a new directory runs/TIME-NAME below
/// the current one.
/// @returns the directory
/// @throws error (config) naming the directory and why it cannot be made
std::string make_run_dir(const std::string& wanted, const std::string& name);

} // namespace smp
