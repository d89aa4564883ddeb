#pragma once

// The report as JSON, for tools. Names of keys do not change.

#include "apps/report/rank_table.hpp"
#include "apps/report/run_source.hpp"

#include <nlohmann/json.hpp>

#include <string>
#include <vector>

namespace smp::app {

using json = nlohmann::ordered_json;

/// The head of every answer: run, state, text, healthy, problems, and what the
/// files say.
json head_json(const std::string& place, const run_look& x);

json to_json(const actor_status& x);

json actors_json(const run_status& x);

/// The actors as a tree, each with its "children".
json tree_json(const run_status& x);

json health_json(const run_status& x);

json waits_json(const run_status& x);

json comm_json(const run_status& x);

json to_json(const rank_row& x);

} // namespace smp::app
