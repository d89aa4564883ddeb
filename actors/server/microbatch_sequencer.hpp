#pragma once

// The order of microbatches through modules that change state (R19).

#include "transport/error.hpp"
#include "transport/ids.hpp"
#include "transport/wait.hpp"

#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace smp {

/// A batch norm that sees microbatch 2 before microbatch 1 ends a step with
/// statistics that one process would not have, and no gradient shows it. So
/// calls of a
/// module that changes state enter in the order in which their microbatches
/// were started ("turns"): each only after all older microbatches are past the
/// module. The oldest is never held, so nobody waits for ever.
///
/// A microbatch is surely past a module when its forward phase is over. Once a
/// step showed that all microbatches call the module equally often, one that
/// made as many calls, all of which are over, is past it as well, so that the
/// next one need not wait for the rest of the model. That is a guess: if it
/// calls the module once more when a younger one has been there, the step fails
/// (it may be run again, R42), and the module goes back to the safe rule. So
/// does a module that is not called equally often.
///
/// A call after the first backward is late: younger microbatches may have been
/// there. Nobody can hold them for it, as the schedule may need their forward
/// phases before it lets that backward begin. So the step ends with an error if
/// they were there, and later ones run one microbatch after the other.
///
/// Thread-safe: the MODULE SERVER asks for requests, before they get the
/// token; executions ask for calls on their own rank.
class microbatch_sequencer {
public:
  /// @param self for errors
  /// @param name of a module, for errors
  explicit microbatch_sequencer(
    rank_id self = rank_id{}, std::function<std::string(module_id)> name = {});

  /// Replaces the ordered modules; what is known of those that stay is kept.
  /// Between steps.
  /// @param sure those that keep the safe rule: nobody could take back what a
  ///        step did to their state
  void set_modules(const std::vector<module_id>& xs,
                   const std::set<module_id>& sure = {});

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

  /// The modules that microbatches of this step, or the last one, called after
  /// their first backward, on this rank.
  std::set<module_id> called_late() const;

  /// From now on, as long as one of `xs` is ordered, each microbatch begins
  /// when the one before it ended. Between steps, on all ranks.
  void set_serial(const std::set<module_id>& xs);

  bool serial() const;

  /// From now on a microbatch is past one of `xs` when its forward phase is
  /// over. Between steps, on all ranks: each may have guessed wrong.
  void distrust(const std::set<module_id>& xs);

  // -- microbatches -----------------------------------------------------------

  /// Lets a call of microbatch `x` enter all of `xs` unless it is too early;
  /// modules that are not ordered let everybody in.
  /// @returns whether it entered
  /// @throws error (unsupported) if a younger microbatch has been there
  bool open(const std::vector<module_id>& xs, uint64_t turn, microbatch_id x);

  /// @returns null if the call entered, else what is done when it did. Fails
  /// where `open` throws.
  completion_ptr opening(const std::vector<module_id>& xs, uint64_t turn,
                         microbatch_id x);

  /// A call of `turn` that entered `xs` is over.
  void leave(const std::vector<module_id>& xs, uint64_t turn);

  /// The forward phase of `turn` is over.
  /// @param away the step body runs on another rank: calls here that are not
  ///        over are late ones, which overtook this news
  void forward_over(uint64_t turn, bool away = false);

  // -- reports ----------------------------------------------------------------

  /// The modules of which a call of this step, the last one, came too late.
  std::set<module_id> overtaken_modules() const;

  /// Calls of this module since it is ordered, on this rank.
  uint64_t calls(module_id x) const;

private:
  struct gate {
    /// Calls that make a microbatch pass; nothing: its forward phase must end.
    std::optional<uint64_t> expected;
    bool sure = false;             // `expected` stays empty
    bool serial = false;           // see `set_serial`
    std::vector<uint64_t> entered; // calls of this step, by turn
    std::vector<uint64_t> left;    // those that are over
    std::vector<uint64_t> late;    // those after the forward phase that are not
    uint64_t calls = 0;            // of all steps
  };

  struct held {
    std::vector<module_id> modules;
    uint64_t turn = 0;
    completion_ptr opened;
  };

  bool is_open(const std::vector<module_id>& xs, uint64_t turn) const;
  bool passed(const gate& x, uint64_t turn) const;
  failure overtaken(const std::vector<module_id>& xs, uint64_t turn,
                    microbatch_id x);
  void enter(const std::vector<module_id>& xs, uint64_t turn);
  std::vector<completion_ptr> take_opened();
  void moved(std::unique_lock<std::mutex> guard);

  const rank_id self_;
  const std::function<std::string(module_id)> name_;
  mutable std::mutex mutex_;
  std::map<module_id, gate> gates_;
  std::vector<bool> over_; // by turn
  std::set<module_id> overtaken_;
  std::set<module_id> called_late_;
  std::vector<held> held_;
  bool asked_ = false; // somebody wants to hear of it
  std::function<void()> on_moved_;
};

} // namespace smp
