#pragma once

// The order of microbatches through modules that change state (R19).

#include "transport/ids.hpp"
#include "transport/wait.hpp"

#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

namespace smp {

/// A batch norm that sees microbatch 2 before microbatch 1 ends a step with
/// other statistics than one process, and no gradient tells. So calls of a
/// module that changes state enter in the order in which their microbatches
/// were started ("turns"): each only after all older microbatches are past the
/// module. The oldest is never held, so nobody waits for ever.
///
/// A microbatch is surely past a module when its forward phase is over. Once a
/// step showed that all microbatches call the module equally often, one that
/// made as many calls is past it as well, so that the next one need not wait
/// for the rest of the model. A module that is not called equally often goes
/// back to the sure rule.
///
/// Thread-safe: the MODULE SERVER asks for requests, before they get the
/// token; executions ask for calls on their own rank.
class microbatch_sequencer {
public:
  /// Replaces the ordered modules; what is known of those that stay is kept.
  /// Between steps.
  void set_modules(std::vector<module_id> xs);

  /// Tells whether any module is ordered.
  bool used() const;

  /// `f` hears, on any thread, that something may be open that was not when
  /// `open` was asked.
  void on_moved(std::function<void()> f);

  // -- steps ------------------------------------------------------------------

  void begin_step(uint64_t microbatches);

  /// Learns how often the modules are called.
  /// @param complete no microbatch failed
  void end_step(bool complete);

  // -- microbatches -----------------------------------------------------------

  /// Tells whether a call of `turn` may enter all of `xs`; always true of
  /// modules that are not ordered.
  bool open(const std::vector<module_id>& xs, uint64_t turn);

  /// @returns null if `open(xs, turn)`, else what is done when it is.
  completion_ptr opening(const std::vector<module_id>& xs, uint64_t turn);

  /// A call of `turn` that entered `xs` is over.
  void leave(const std::vector<module_id>& xs, uint64_t turn);

  /// The forward phase of `turn` is over.
  void forward_over(uint64_t turn);

  // -- reports ----------------------------------------------------------------

  /// Calls of this module since it is ordered, on this rank.
  uint64_t calls(module_id x) const;

  /// @returns modules that a microbatch called more often than any before it,
  /// when a younger one was inside already; each once.
  std::vector<module_id> take_overtaken();

private:
  struct gate {
    /// Calls that make a microbatch pass; nothing: its forward phase must end.
    std::optional<uint64_t> expected;
    bool varies = false;
    bool overtaken = false;
    std::vector<uint64_t> counts; // of this step, by turn
    uint64_t calls = 0;           // of all steps
  };

  struct held {
    std::vector<module_id> modules;
    uint64_t turn = 0;
    completion_ptr opened;
  };

  bool is_open(const std::vector<module_id>& xs, uint64_t turn) const;
  bool passed(const gate& x, uint64_t turn) const;
  void note_overtaken(const std::vector<module_id>& xs, uint64_t turn);
  std::vector<completion_ptr> take_opened();
  void moved(std::unique_lock<std::mutex> guard);

  mutable std::mutex mutex_;
  std::map<module_id, gate> gates_;
  std::vector<bool> over_; // by turn
  std::vector<held> held_;
  bool asked_ = false; // somebody wants to hear of it
  std::function<void()> on_moved_;
};

} // namespace smp
