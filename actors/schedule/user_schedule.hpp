#pragma once

// A user's schedule actor as runtime/ sees it: free of CAF.

#include "actors/protocol/actor_host.hpp"
#include "partition/schedule/schedule.hpp"

#include <chrono>
#include <functional>
#include <memory>
#include <string>

namespace smp {

class schedule_actor_type;

/// What the PIPELINE SCHEDULER needs to use a user's actor.
struct user_schedule {
  std::shared_ptr<const schedule_actor_type> type;
  /// `smp.schedule.options`
  std::string options;
  uint64_t partitions = 1;
  /// Bound on microbatches alive, for a step with this number of microbatches.
  std::function<uint64_t(uint64_t microbatches)> active;
  /// For each answer (R34).
  std::chrono::milliseconds timeout{60'000};
  /// Bytes that this rank keeps; callable on any thread.
  std::function<uint64_t()> memory_in_use;
  /// Gives the actor a thread of its own, on which it may block without
  /// delaying others. Off in tests that have no threads.
  bool own_thread = true;
};

/// Opens a plug-in, which stays loaded until the process ends.
/// @throws error (config) if `path` is not a plug-in of this interface or has
/// no
///         schedule `name`; the error lists those it has
std::shared_ptr<const schedule_actor_type>
load_schedule_actor(const std::string& path, const std::string& name);

/// A user's actor may be stateful, so the checker simulates a separate instance
/// (R34): this schedule spawns one, asks it, and ends it.
/// @pre used on one thread, which is not of the actor system
schedule_ptr rehearse(actor_host& host, const user_schedule& x,
                      uint64_t microbatches);

} // namespace smp
