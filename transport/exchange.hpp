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

/// Exchanges what is not a request: norms, states, names. If receives had to be
/// posted in the sender's order, ranks could deadlock, so both sides name what
/// they exchange and are matched by name, in whatever order messages arrive.
/// Waits end by themselves when the other rank dies. Thread-safe.
class exchange {
public:
  explicit exchange(fabric& x);
  ~exchange();

  // -- point to point ---------------------------------------------------------

  /// Sends `x` under `name`. Names may be reused: the n-th send under a name
  /// matches the n-th receive of that name. (A name that is used only once
  /// still leaves a counter behind: name repeated messages after their kind,
  /// not their number.)
  void send(rank_id to, const std::string& name, payload x);

  /// Parks until the message arrives. @throws error when `from` is lost
  payload receive(rank_id from, const std::string& name);

  // -- collectives over `group` (ascending ranks, own one included) -----------
  // Every rank of the group calls with the same name, in any order of names.
  // Names of different groups and of different collectives are independent.

  void barrier(std::span<const rank_id> group, const std::string& name);

  /// Element-wise sum over the group, the same bits on every rank (summed in
  /// group order). @throws error when the ranks differ in the number of values
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

  /// Takes a message of kind `exchange`. One that no correct rank sends is
  /// dropped, and fails every wait for `from`, now and later.
  void deliver(rank_id from, message x);

  /// Fails every wait for `x.rank`, now and later.
  void peer_lost(const failure& x) {
    fail(x.rank, x);
  }

  /// Fails every wait for `from` with `x`, now and later.
  void fail(rank_id from, const failure& x);

private:
  using key = std::pair<rank_id, std::string>;
  using awaited_ptr = std::shared_ptr<awaited<payload>>;

  /// Arrived messages and pending receives of one name, by sequence number.
  struct slot {
    uint64_t next_receive = 0;
    std::map<uint64_t, payload> arrived;
    std::map<uint64_t, awaited_ptr> waiting;
  };

  awaited_ptr post_receive(rank_id from, const std::string& tag);
  void send_tagged(rank_id to, const std::string& tag, payload x);

  fabric& fabric_;
  std::mutex mutex_;
  std::map<key, uint64_t> sent_;
  std::map<key, slot> slots_;
  std::map<rank_id, failure> lost_;
};

} // namespace smp
