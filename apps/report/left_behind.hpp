#pragma once

// What a run leaves in its directory beside numbers: where its modules are, and
// the waits of its last stall. Files are as anybody may have left them: what
// does not fit is left out.

#include "apps/report/run_json.hpp"

#include <string>

namespace smp::app {

/// @returns RUN_DIR/partition.json as programs that look at runs show it:
/// "nodes", each with "name", "type", "cost" (share of its subtree), "device"
/// and "parent" (its position; null for the root), at most 5000 of them and
/// "left_out"; "loads" by device, "costs", "notes" and what crosses. Null if
/// there is none.
json stored_partition(const std::string& run_dir);

/// @param x not null
/// @returns a line per node, indented below its parent, then loads and notes
std::string partition_text(const json& x);

/// @returns the waits that the last stall left ("chain" and "all"); null if
/// there was none
json stored_waits(const std::string& run_dir);

} // namespace smp::app
