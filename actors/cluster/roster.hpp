#pragma once

// Who takes part in a run, without actors: what the SUPERVISOR knows and says.

#include "actors/cluster/membership.hpp"

#include <chrono>
#include <map>
#include <set>
#include <string>
#include <vector>

namespace smp {

/// Ranks that differ in build or configuration would misread each other or
/// compute nonsense, and a missing or lost rank would make all others wait: so
/// whoever does not fit is named, with all that tells it from the rest.
class roster {
public:
  roster(uint64_t world_size, std::string run_id);

  // -- joining ----------------------------------------------------------------

  /// @returns why somebody who belongs to another run is refused, or
  /// an empty failure. It concerns nobody else.
  failure check_stranger(const member& x) const;

  /// Takes a rank in. @returns why it does not fit, or an empty failure. The
  /// run cannot begin then.
  failure admit(const member& x);

  bool complete() const noexcept {
    return members_.size() == world_size_;
  }

  /// @returns the members by rank. @pre `complete()`
  std::vector<member> members() const;

  /// @returns an error that names the ranks that did not come within `limit`.
  failure missing(std::chrono::milliseconds limit) const;

  /// @returns the ranks that did not come yet
  std::vector<rank_id> absent() const;

  /// @returns what to say of such ranks before the time for joining is over:
  /// those of a large job may begin minutes apart.
  static std::string describe_absence(const std::vector<rank_id>& x,
                                      std::chrono::duration<double> since);

  // -- leaving ----------------------------------------------------------------

  void leave(rank_id x);

  /// @returns whether this is news: the rank did not leave and was not lost.
  bool lose(const failure& x);

  /// What to say of a rank whose connection broke, when nobody knows better:
  /// where no rank of its machine is left, that machine is lost.
  /// @param connected ranks that are still connected
  failure loss_of(rank_id x, const std::set<rank_id>& connected) const;

  /// @returns whether the end of this rank would be a loss.
  bool expected(rank_id x) const;

  /// @returns what to say of a rank that a signal stopped while no STALL
  /// MONITOR looked: it begins when all have joined, and ends when the first
  /// leaves.
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
