#pragma once

#include "actors/order/step_record.hpp"
#include "actors/protocol/messages.hpp"

#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace smp {

/// A rank's records of steps, by kind of step, and the choice of the step to
/// replay. pp_rank 0 chooses it for all ranks of a pipeline: if each rank chose
/// for itself, each would wait for messages that the others do not send (R33).
///
/// Thread-safe: the MODULE SERVER plans and records steps, and executions look
/// up what the record knows about them.
class order_book {
public:
  /// The first one or two steps still learn what later steps know. A job that
  /// learns in every step eventually replays such a step.
  static constexpr uint64_t max_learnt = 3;

  /// Bounds memory: a record knows each call of its step, and a job may feed
  /// ever new shapes, for which replay is of no use. All ranks use keys in the
  /// same order, so they evict the same ones.
  static constexpr size_t max_keys = 16;

  struct options {
    /// Replays the order of a recorded step (`smp.static_mode`).
    bool static_mode = false;
    /// Number of steps to record; the fastest of them is replayed.
    uint64_t steps = 5;
    /// That order does not depend on timing (`smp.deterministic_server`).
    bool fixed_order = false;
  };

  /// What happened to a step on this rank.
  struct step_note {
    step_id step;
    uint64_t key = 0;
    bool recorded = false;
    bool replayed = false;
    /// How it diverged from the record it then dropped; empty if it did not.
    std::string divergence;
    /// This rank saw it diverge, and the step fails for that.
    bool refused = false;
    /// The recorded step, if it is replayed.
    step_id source = {};
  };

  /// What a pipeline would replay next. Pipelines that share modules exchange
  /// these, as a wait for peers in another pipeline ends only if that pipeline
  /// reaches the same place.
  struct proposal {
    bool replays = false;
    step_id source;
    /// Steps of this kind that have records.
    std::vector<step_id> records;
    /// Identifies a computed order.
    uint64_t order = 0;
  };

  explicit order_book(options x);

  /// Tells whether steps are recorded or replayed at all.
  bool active() const noexcept {
    return options_.static_mode || options_.fixed_order;
  }

  bool static_mode() const noexcept {
    return options_.static_mode;
  }

  bool fixed_order() const noexcept {
    return options_.fixed_order;
  }

  /// Tells whether sizes of results of a replayed step are known before their
  /// answer arrives; one that differs fails the step. (With a fixed order the
  /// requester waits for it all the same, so that the wait has its place.)
  bool foretells() const;

  // -- pp_rank 0 --------------------------------------------------------------

  /// Sets the key of the steps from now on.
  void set_key(uint64_t x);

  proposal propose() const;

  /// Makes the next plan replay what the first one of `all`, the proposals of
  /// pipelines that share modules, would. If any of them cannot, all forget
  /// their records of this kind of step and record it.
  void agree(const std::vector<proposal>& all);

  /// Decides whether to record or replay the next step.
  step_plan plan(step_id step);

  /// Reports how long a step took, in seconds.
  /// @param learnt it waited for things that later steps know in advance: it is
  ///        replayed only if there is nothing better
  /// @param warm_up number of first steps of each kind treated the same way
  void took(step_id step, double seconds, bool learnt = false,
            size_t warm_up = 0);

  // -- all ranks --------------------------------------------------------------

  /// @returns the record to replay, or null if the step is recorded.
  /// @throws error (internal) if this rank does not have that record
  std::shared_ptr<const step_record> begin(const step_plan& x);

  /// Stores the record of a step that succeeded.
  void recorded(const step_plan& x, step_record record);

  /// The step diverges from its record.
  void diverged(const std::string& how);

  /// The same, but others cannot go on without the record
  /// (`step_plan::same_order`): the step fails.
  void refused();

  /// A size that the record told was wrong: it tells none any more.
  void misled();

  /// @returns what to tell users of a divergence
  std::string describe(microbatch_id m, const std::string& how) const;

  /// The step is over.
  void end();

  /// The note of the running step, or of the last one.
  step_note note() const;

  /// @returns the record of a step, or null.
  std::shared_ptr<const step_record> find(uint64_t key, step_id step) const;

  /// Replaces the record of a step and chooses it for replay.
  /// @param order see `proposal::order`
  void choose(uint64_t key, step_id step, step_record record, uint64_t order);

  /// Forgets everything, between steps, as the model has changed.
  void clear();

  /// Forgets all records, between steps, as steps behave differently from now
  /// on. The last step is treated like those that learn.
  void outdate();

  /// @returns how many steps of a kind were recorded, including forgotten ones
  uint64_t recorded_steps(uint64_t key) const;

  // -- executions -------------------------------------------------------------

  /// Tells whether the running step replays a record and has not diverged.
  bool replaying() const;

  /// How request number `number`, from 0, of an execution was sent in the
  /// replayed step. In this step it goes to the same place, or else the step
  /// diverges.
  /// @param execution the request that it serves (`execution::id`)
  /// @returns null if the running step does not replay, or the record has no
  ///          such request
  std::shared_ptr<const recorded_call> sent(request_id execution,
                                            uint32_t number) const;

  /// @returns a lower bound: promises of the running step need a higher number
  ///          unless the record numbers them. Stays after a divergence.
  uint32_t last_promise() const;

private:
  struct entry {
    uint64_t key = 0;
    std::map<step_id, std::shared_ptr<const step_record>> records;
    std::map<step_id, double> seconds;
    uint64_t learnt = 0; // number of `seconds` entries that learnt
    uint64_t count = 0;  // steps ever recorded
    std::optional<step_id> chosen;
    uint64_t order = 0; // of `chosen`, if it was computed
  };

  /// What pipelines agreed on for the next step.
  struct agreement {
    std::optional<step_id> source;
    bool same_order = false;
  };

  std::optional<step_id> best(const entry& x) const;
  static entry forgotten(const entry& x);
  const entry* find(uint64_t key) const;
  entry& use(uint64_t key);
  static void choose(entry& x, step_id step);

  const options options_;
  mutable std::mutex mutex_;
  uint64_t key_ = 0;
  std::optional<agreement> agreed_;
  std::list<entry> entries_; // the last one used comes first
  std::shared_ptr<const step_record> replayed_;
  uint32_t last_promise_ = 0;
  step_note note_;
  bool misled_ = false;
};

template <class Inspector>
bool inspect(Inspector& f, order_book::proposal& x) {
  return f.object(x).fields(
    f.field("replays", x.replays), f.field("source", x.source),
    f.field("records", x.records), f.field("order", x.order));
}

} // namespace smp
