#pragma once

namespace smp {

class model_map;
class rank_context;

/// A training step shows which modules microbatches must pass in order (R19):
/// modules whose state it did not change are released from the order, on all
/// ranks alike.
class order_learning {
public:
  /// Both outlive this.
  order_learning(const rank_context& rank, model_map& map)
    : rank_(rank), map_(map) {
    // nop
  }

  /// Tells whether this is still unknown, and microbatches may overtake each
  /// other at all.
  bool pending() const;

  /// Remembers the state that the step may change.
  void begin_step();

  /// Learns from a step that completed on every rank. Collective over the ranks
  /// that compute the model together (`comm_group::mp`).
  /// @returns whether modules were released
  /// @throws error (unsupported), the same on all ranks, if state changed in a
  /// module without microbatch order; the state is then rolled back
  bool end_step();

private:
  const rank_context& rank_;
  model_map& map_;
};

} // namespace smp
