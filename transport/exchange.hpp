#pragma once

#include "transport/fabric.hpp"
#include "transport/wait.hpp"

#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>

namespace smp {

/// Ranks have things to tell each other besides requests: norms, states,
/// names. A receive that had to be posted in the sender's order could
/// deadlock, so both sides name what they exchange and the names match, in
/// whatever order things arrive. Waits end by themselves when the other rank
/// dies.
class exchange {
public:
  explicit exchange(fabric& x);

  // -- point to point ---------------------------------------------------------

  /// Sends `x` under `name`; names are used again freely: the n-th send under
  /// a name meets the n-th receive of that name.
  void send(rank_id to, const std::string& name, payload x);

  /// Parks until the message comes. @throws error when `from` is lost
  payload receive(rank_id from, const std::string& name);

  // -- collectives over `group` (ascending ranks, own one included) ------------
  // Every rank of the group calls with the same name, in any order of names.

  void barrier(std::span<const rank_id> group, const std::string& name);

  /// Element-wise sum over the group, the same bits on every rank (summed in
  /// group order).
  std::vector<double> all_reduce_sum(std::span<const rank_id> group,
                                     const std::string& name,
                                     std::vector<double> x);

  /// @returns the values of all ranks, in group order.
  std::vector<payload> all_gather(std::span<const rank_id> group,
                                  const std::string& name, payload x);

  /// @returns the value of `root` on every rank.
  payload broadcast(std::span<const rank_id> group, const std::string& name,
                    rank_id root, payload x);

  // -- called by the session --------------------------------------------------

  /// Takes a message of kind `exchange`.
  void deliver(rank_id from, message x);

  /// Fails every wait for `x.rank`, now and later.
  void peer_lost(const failure& x);

private:
  struct slot;
  using key = std::pair<rank_id, std::string>;

  fabric& fabric_;
  std::mutex mutex_;
  std::map<key, std::shared_ptr<slot>> slots_;
  std::map<rank_id, failure> lost_;
};

} // namespace smp
