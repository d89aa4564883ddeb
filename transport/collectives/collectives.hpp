#pragma once

#include "transport/collectives/collective_call.hpp"
#include "transport/collectives/collective_plan.hpp"
#include "transport/collectives/started_collective.hpp"
#include "transport/device_ops.hpp"
#include "transport/fabric.hpp"
#include "transport/flight/flight_record.hpp"
#include "transport/wait.hpp"

#include <memory>

namespace smp {

/// A collective of a step, for reports on what a rank does.
struct begun_collective {
  collective_label label;
  std::string place; // see `collective_call`
  bool runs = false;
  /// While it runs: the ranks that it waits for and that have not joined.
  std::vector<rank_id> absent;
};

/// Runs a rank's collectives. Microbatches of a rank run in any order, so two
/// ranks that reach their collectives in different order must still meet
/// (design.md, section 7): a call is matched by its label, never by its
/// arrival, and messages that precede their call are kept. Nothing here waits:
/// `start` returns at once, and arriving messages do the rest. Thread-safe.
///
/// The signatures of one call must agree, or the call fails on all ranks with
/// what each stated. On a rank where it is already complete, the next call of
/// that name fails instead, or `untold` reports it. Results have the same bits
/// on every rank, and from run to run: the order of additions follows from the
/// group, the size and the machines on which the ranks run.
class collectives {
public:
  /// @param devices for calls on the device of this rank; null: none
  /// @param record notes what begins and ends, and outlives this; null: none
  explicit collectives(fabric& x, collective_limits limits = {},
                       std::shared_ptr<device_ops> devices = {},
                       flight_record* record = nullptr);

  /// Cancels running collectives. @pre the fabric was stopped, or never started
  ~collectives();

  collectives(const collectives&) = delete;
  collectives& operator=(const collectives&) = delete;

  /// Begins a collective, which this rank joins at once. The collective owns
  /// its memory until it is done. On a device, what it gives is there when it
  /// is done.
  /// @throws error (config, unsupported) for a call that can never work,
  /// (transport) if the device has no memory for it
  started_collective start(collective_call x);

  /// @returns whether something is being summed or moved at this moment, or a
  /// device is at it.
  bool busy() const;

  /// @returns the collectives that began here in `step`, which runs or was the
  /// last one; nothing while busy.
  std::vector<begun_collective> begun(step_id step) const;

  /// @returns the failure of a collective outside of steps that was found only
  /// after it had completed here, unless a later call of its name failed with
  /// it; else nothing. Within a step, the step fails on all ranks.
  failure untold() const;

  // -- called by the session --------------------------------------------------

  /// Sets the machine of each rank, numbered in any way; until then all ranks
  /// share one. All ranks pass the same numbers. @pre nothing was begun
  void place(std::vector<uint64_t> machine_of_rank);

  /// Takes a message of kind `collective`. One that no correct rank sends is
  /// dropped, and fails all collectives with `from`, now and later.
  void deliver(rank_id from, message x);

  /// Fails all collectives with `x.rank`, now and later.
  void peer_lost(const failure& x) {
    fail(x.rank, x);
  }

  /// Fails all collectives of a step, now and later. They no longer match:
  /// ranks hear of the failure at different places.
  void step_failed(step_id step, const failure& why);

  /// The step has ended: no rank begins a collective of it any more.
  void step_over(step_id step);

  /// Fails all collectives with `peer`, now and later.
  void fail(rank_id peer, const failure& x);

private:
  class impl;
  std::shared_ptr<impl> impl_;
};

} // namespace smp
