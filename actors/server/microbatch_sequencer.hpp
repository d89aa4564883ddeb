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
/// calls of a module that changes state enter in the order in which their
/// microbatches were started ("turns"): each only after all older
/// microbatches have passed the module. The oldest is never held, so no wait
/// lasts forever.
///
/// A microbatch has surely passed a module when its forward phase is over. Once
/// a step has shown that all microbatches call the module equally often, one
/// that made that many calls, all of them over, has passed it too, so the next
/// one need not wait for the rest of the model. This is a guess: if it calls
/// the module again when a younger one has been there, the step fails (it may
/// be run again, R42), and the module returns to the safe rule, as does one
/// that is not called equally often.
///
/// A call after the first backward is late: younger microbatches may have been
/// there. They cannot be held for it, as the schedule may need their forward
/// phases before it lets that backward begin. So the step ends with an error if
/// they were there, and later steps run one microbatch after the other.
///
/// Thread-safe: the MODULE SERVER asks on behalf of requests, before they get
/// the token; executions ask for calls on their own rank.
class microbatch_sequencer {
public:
  /// @param self for errors
  /// @param name of a module, for errors
  explicit microbatch_sequencer(
    rank_id self = rank_id{}, std::function<std::string(module_id)> name = {});

  /// Replaces the set of ordered modules, between steps; keeps what is known
  /// about those that stay.
  /// @param sure modules that keep the safe rule, as the effect of a step on
  ///        their state cannot be undone
  /// @param serial each microbatch begins when the one before it has ended
  void set_modules(const std::vector<module_id>& xs,
                   const std::set<module_id>& sure = {}, bool serial = false);

  /// Tells whether any module is ordered.
  bool used() const;

  /// `f` is called, on any thread, when a request that `open` refused may be
  /// able to enter now.
  void on_moved(std::function<void()> f);

  // -- steps ------------------------------------------------------------------

  void begin_step(uint64_t microbatches);

  /// Learns how often each module is called.
  /// @param complete no microbatch failed
  void end_step(bool complete);

  /// The modules that microbatches of this step, or of the last one, called
  /// after their first backward, on this rank.
  std::set<module_id> called_late() const;

  /// From now on, while any of `xs` is ordered, each microbatch begins when the
  /// one before it has ended. Between steps, on all ranks.
  void set_serial(const std::set<module_id>& xs);

  bool serial() const;

  /// Makes a microbatch pass modules of `xs` only when its forward phase is
  /// over. Between steps, on all ranks: each may have guessed wrong.
  void distrust(const std::set<module_id>& xs);

  // -- microbatches -----------------------------------------------------------

  /// Lets a call of microbatch `x` enter all of `xs` unless it is too early;
  /// modules that are not ordered admit every call.
  /// @returns whether it entered
  /// @throws error (unsupported) if a younger microbatch has been there already
  bool open(const std::vector<module_id>& xs, uint64_t start_number,
            microbatch_id x);

  /// @returns null if the call entered, or a completion that is done once it
  /// has entered. It fails where `open` throws.
  completion_ptr opening(const std::vector<module_id>& xs,
                         uint64_t start_number, microbatch_id x);

  /// A call of `start_number` that had entered `xs` is over.
  void leave(const std::vector<module_id>& xs, uint64_t start_number);

  /// The forward phase of `start_number` is over.
  /// @param away the step body runs on another rank: calls here that are not
  ///        over are late ones, which overtook this message
  void forward_over(uint64_t start_number, bool away = false);

  // -- reports ----------------------------------------------------------------

  /// The modules for which a call of this step, or the last, came too late.
  std::set<module_id> overtaken_modules() const;

  /// Number of calls of this module on this rank since it became ordered.
  uint64_t calls(module_id x) const;

private:
  struct gate {
    /// Calls after which a microbatch has passed; unset: when its forward ends.
    std::optional<uint64_t> expected;
    bool sure = false;             // `expected` stays empty
    bool serial = false;           // see `set_serial`
    std::vector<uint64_t> entered; // calls of this step, by start number
    std::vector<uint64_t> left;    // calls that are over
    std::vector<uint64_t> late;    // late calls that are not over
    uint64_t calls = 0;            // of all steps
  };

  struct held {
    std::vector<module_id> modules;
    uint64_t start_number = 0;
    completion_ptr opened;
  };

  bool is_open(const std::vector<module_id>& xs, uint64_t start_number) const;
  bool passed(const gate& x, uint64_t start_number) const;
  failure overtaken(const std::vector<module_id>& xs, uint64_t start_number,
                    microbatch_id x);
  void enter(const std::vector<module_id>& xs, uint64_t start_number);
  std::vector<completion_ptr> take_opened();
  void moved(std::unique_lock<std::mutex> guard);

  const rank_id self_;
  const std::function<std::string(module_id)> name_;
  mutable std::mutex mutex_;
  std::map<module_id, gate> gates_;
  bool serial_ = false;
  std::vector<bool> over_; // by start number
  std::set<module_id> overtaken_;
  std::set<module_id> called_late_;
  std::vector<held> held_;
  bool asked_ = false; // a call was refused, so `on_moved_` is due
  std::function<void()> on_moved_;
};

} // namespace smp
