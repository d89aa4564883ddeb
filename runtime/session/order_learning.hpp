#pragma once

namespace smp {

class model_map;
class rank_context;

/// Which modules microbatches have to pass in their order is known when a
/// training step is over (R19): those whose state it left alone are released,
/// on all ranks alike.
class order_learning {
public:
  /// Both outlive this.
  order_learning(const rank_context& rank, model_map& map)
    : rank_(rank), map_(map) {
    // nop
  }

  /// Tells whether no step has told it yet, and microbatches may overtake each
  /// other at all.
  bool pending() const;

  /// Remembers the state that the step may change.
  void begin_step();

  /// Learns from a step that every rank brought to its end. Collective over the
  /// ranks that compute the model together (`comm_group::mp`).
  /// @returns whether modules were released
  /// @throws error (unsupported), the same on all ranks, if state changed where
  ///         nobody keeps its order; it is what it was before the step then
  bool end_step();

private:
  const rank_context& rank_;
  model_map& map_;
};

} // namespace smp
