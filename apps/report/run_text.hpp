#pragma once

// What smp-inspect prints: one function per command, lines for people.

#include "apps/report/run_source.hpp"

#include <optional>
#include <string>

namespace smp::app {

/// @returns all actors of the run, those of no rank first. A rank that does not
/// report has one entry, "r1", which does not answer.
std::vector<actor_status> actors_of(const run_status& x);

/// The output of all commands for a run that did not answer: what its files
/// say, and what is wrong.
std::string state_text(const std::string& place, const run_look& x);

/// A line for each actor.
std::string actor_list(const run_status& x);

/// The same, each below the one that made it.
std::string actor_tree(const run_status& x);

/// @returns an actor by its id; of a rank that does not answer, an entry that
/// says no more than that
std::optional<actor_status> find_actor(const run_status& x,
                                       const std::string& id);

/// All that one actor reports; nothing if no actor has this id.
std::optional<std::string> actor_text(const run_status& x,
                                      const std::string& id);

std::string waits_text(const run_status& x);

/// A line for each rank: whether it is well, and if not, why.
std::string health_text(const run_status& x);

/// What ranks sent to each other.
std::string comm_text(const run_status& x);

} // namespace smp::app
