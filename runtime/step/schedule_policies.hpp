#pragma once

#include "partition/schedule/checker.hpp"
#include "partition/schedule/program.hpp"
#include "partition/schedule/schedule.hpp"
#include "runtime/config/session_config.hpp"

#include <cstdint>
#include <memory>
#include <vector>

namespace smp {

class actor_host;
struct user_schedule;

/// Loads the plug-in of `smp.pipeline = "actor"`, unless the session already
/// has a schedule. Call before creating the actor system, as plug-ins may
/// register message types.
/// @throws error (config) naming the key
void load_schedule(session_config& x);

/// Tells whether calls may continue without their results in this config.
bool takes_promises(const session_config& x);

/// The schedules and service orders that the configuration selects.
class schedule_policies {
public:
  /// All of them outlive this.
  schedule_policies(const session_config& config, size_t partitions,
                    actor_host& host);

  /// Microbatches between forward and backward at one time (R2).
  uint64_t active(uint64_t microbatches) const;

  schedule_ptr make(uint64_t microbatches) const;

  /// The same, except that a user's actor gets a separate instance, which is
  /// queried on the calling thread.
  schedule_ptr make_timeless(uint64_t microbatches) const;

  /// @param chunk_of for this rank, see `service_place`
  service_order order(uint64_t microbatches, size_t pp_rank,
                      std::vector<uint32_t> chunk_of) const;

  /// By pp_rank, see `service_place`.
  std::vector<std::vector<uint32_t>> chunks(const pipeline_program& x,
                                            uint64_t microbatches) const;

  /// @returns `x` as its ranks serve it: with waiting or promised calls
  pipeline_program served(const pipeline_program& x) const;

  /// Simulates the schedule on a program, which may be of another session.
  /// @throws error naming the first wrong task
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
