#pragma once

// Which ranks take part in a run: the logic of the SUPERVISOR, without actors.

#include "actors/cluster/membership.hpp"

#include <chrono>
#include <map>
#include <set>
#include <string>
#include <vector>

namespace smp {

/// Ranks that differ in build or configuration would misread each other or
/// compute wrong results, and a missing or lost rank would make all others
/// wait. So errors name the rank at fault and how it differs from the rest.
class roster {
public:
  roster(uint64_t world_size, std::string run_id);

  // -- joining ----------------------------------------------------------------

  /// @returns why a process that belongs to another run is refused, or an empty
  /// failure. Such a refusal does not affect the members of this run.
  failure check_stranger(const member& x) const;

  /// Admits a rank. @returns why it does not fit, in which case the run cannot
  /// begin, or an empty failure
  failure admit(const member& x);

  bool complete() const noexcept {
    return members_.size() == world_size_;
  }

  /// @returns the members by rank. @pre `complete()`
  std::vector<member> members() const;

  /// @returns an error that names the ranks that did not join within `limit`.
  failure missing(std::chrono::milliseconds limit) const;

  /// @returns the ranks that have not joined yet
  std::vector<rank_id> absent() const;

  /// @returns the text about absent ranks before the join deadline: the ranks
  /// of a large job may start minutes apart.
  static std::string describe_absence(const std::vector<rank_id>& x,
                                      std::chrono::duration<double> since);

  // -- leaving ----------------------------------------------------------------

  void leave(rank_id x);

  /// @returns whether this is news: the rank did not leave and was not lost.
  bool lose(const failure& x);

  /// The loss to report for a rank whose connection broke, if no better cause
  /// is known: if no rank of its machine is left, the machine is lost.
  /// @param connected ranks that are still connected
  failure loss_of(rank_id x, const std::set<rank_id>& connected) const;

  /// @returns whether the end of this rank would be a loss.
  bool expected(rank_id x) const;

  /// @returns the text about a rank that a signal stopped while no STALL
  /// MONITOR ran. The monitor starts when all ranks have joined and ends when
  /// the first one leaves.
  std::string describe_stop(rank_id x,
                            std::chrono::duration<double> since) const;

  // -- properties -------------------------------------------------------------

  uint64_t world_size() const noexcept {
    return world_size_;
  }

  std::vector<rank_id> present() const;

  std::vector<rank_id> gone() const;

  const std::vector<failure>& losses() const noexcept {
    return losses_;
  }

private:
  uint64_t world_size_;
  std::string run_id_;
  std::map<rank_id, member> members_;
  std::set<rank_id> gone_;
  std::vector<failure> losses_; // first one first
};

} // namespace smp
