#pragma once

#include "partition/checker.hpp"
#include "partition/program.hpp"
#include "partition/schedule.hpp"
#include "runtime/config/session_config.hpp"

#include <cstdint>
#include <memory>
#include <vector>

namespace smp {

class actor_host;
struct user_schedule;

/// Loads the plug-in of `smp.pipeline = "actor"`, if the session got no
/// schedule otherwise. Before the actor system is made, as plug-ins may bring
/// message types.
/// @throws error (config) naming the key
void load_schedule(session_config& x);

/// Tells whether calls of this configuration may go on without their results.
bool takes_promises(const session_config& x);

/// Schedules and service orders as the configuration wants them.
class schedule_policies {
public:
  /// All of them outlive this.
  schedule_policies(const session_config& config, size_t partitions,
                    actor_host& host);

  /// Microbatches between forward and backward at one time (R2).
  uint64_t active(uint64_t microbatches) const;

  schedule_ptr make(uint64_t microbatches) const;

  /// The same, and an instance of its own of a user's actor, which is asked on
  /// the calling thread.
  schedule_ptr make_timeless(uint64_t microbatches) const;

  /// @param chunk_of of this rank, see `service_place`
  service_order order(uint64_t microbatches, size_t pp_rank,
                      std::vector<uint32_t> chunk_of) const;

  /// By pp_rank, see `service_place`.
  std::vector<std::vector<uint32_t>> chunks(const pipeline_program& x,
                                            uint64_t microbatches) const;

  /// @returns `x` as its ranks serve it, where calls wait or do not
  pipeline_program served(const pipeline_program& x) const;

  /// Plays the schedule on a program that need not be that of this session.
  /// @throws error naming the first task that is wrong
  schedule_report play(const pipeline_program& x, uint64_t microbatches,
                       bool timeline) const;

  /// The actor of `smp.pipeline = "actor"`, or null.
  const std::shared_ptr<const user_schedule>& user() const noexcept {
    return user_;
  }

private:
  std::shared_ptr<const user_schedule> make_user() const;

  const session_config& config_;
  size_t partitions_;
  actor_host& host_;
  bool promised_;
  std::shared_ptr<const user_schedule> user_;
};

} // namespace smp
