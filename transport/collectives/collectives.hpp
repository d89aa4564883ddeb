#pragma once

#include "transport/collectives/collective_call.hpp"
#include "transport/collectives/collective_plan.hpp"
#include "transport/collectives/started_collective.hpp"
#include "transport/fabric.hpp"
#include "transport/wait.hpp"

#include <memory>

namespace smp {

/// A collective of a step, for who looks at what a rank does.
struct begun_collective {
  collective_label label;
  std::string place; // see `collective_call`
  bool runs = false;
  /// While it runs: the ranks that it waits for and that did not join.
  std::vector<rank_id> absent;
};

/// Microbatches of a rank run in any order, so two ranks that reach their
/// collectives in different order must still meet (design.md, section 7): a
/// call is matched by its label, never by when it came, and what comes before
/// its call is kept. Nothing here waits: `start` returns at once, and arriving
/// messages do the rest. Thread-safe.
///
/// What ranks say of one call must agree, or it fails on all of them with what
/// each said; on one that has all it needs by then, the next call of that name
/// fails, or `untold` has it. Results have the same bits on every rank, and
/// from run to run: the order of additions follows from the group, the size and
/// the machines on which its ranks are.
class collectives {
public:
  explicit collectives(fabric& x, collective_limits limits = {});

  /// What runs is cancelled. @pre the fabric was stopped, or never started
  ~collectives();

  collectives(const collectives&) = delete;
  collectives& operator=(const collectives&) = delete;

  /// Begins a collective, in which this rank takes part from now on. Its memory
  /// belongs to it until it is done.
  /// @throws error (config, unsupported) for what can never work
  started_collective start(collective_call x);

  /// @returns whether something is being summed or moved at this moment.
  bool busy() const;

  /// @returns what began here in a step that runs or was the last one; nothing
  /// while busy.
  std::vector<begun_collective> begun(step_id step) const;

  /// @returns what is wrong with a collective outside of steps that was over
  /// here before that was found out, if no later call of its name failed with
  /// it; else nothing. Within a step, the step fails on all ranks.
  failure untold() const;

  // -- called by the session --------------------------------------------------

  /// Tells on which machine each rank is, by any numbers; until then all are on
  /// one. All ranks are told the same. @pre nothing was begun
  void place(std::vector<uint64_t> machine_of_rank);

  /// Takes a message of kind `collective`. One that no correct rank sends is
  /// dropped, and fails all collectives with `from`, now and later.
  void deliver(rank_id from, message x);

  /// Fails all collectives with `x.rank`, now and later.
  void peer_lost(const failure& x) {
    fail(x.rank, x);
  }

  /// Fails all collectives of a step, now and later. They are in disorder:
  /// ranks hear of the failure at different places.
  void step_failed(step_id step, const failure& why);

  /// Nobody begins a collective of the step any more.
  void step_over(step_id step);

  /// Fails all collectives with `peer`, now and later.
  void fail(rank_id peer, const failure& x);

private:
  class impl;
  std::shared_ptr<impl> impl_;
};

} // namespace smp
