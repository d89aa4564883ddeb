#pragma once

#include "actors/protocol/messages.hpp"
#include "actors/replay/step_record.hpp"

#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace smp {

/// A rank's records of steps, by kind of step, and which step is replayed. All
/// ranks of a pipeline replay the same step, which pp_rank 0 chooses: with one
/// choice per rank each would wait for what the others do not do (R33).
///
/// Thread-safe: the MODULE SERVER plans and records steps, executions look up
/// what the record knows of them.
class record_book {
public:
  /// The first one or two steps still learn what later ones know. A job that
  /// learns in every step ends up with a record of such a step.
  static constexpr uint64_t max_learnt = 3;

  /// A record keeps all of each message but its tensors. A job that feeds ever
  /// new shapes gets no replay for them, and must not run out of memory. All
  /// ranks use keys in the same order, so they forget the same ones.
  static constexpr size_t max_keys = 16;

  struct options {
    /// Replays messages and order (`smp.static_mode`).
    bool static_mode = false;
    /// Steps to record, of which the fastest is replayed.
    uint64_t steps = 5;
    /// A step that diverges from its record goes on without.
    bool fall_back = false;
    /// Replays an order that does not depend on timing
    /// (`smp.deterministic_server`).
    bool fixed_order = false;
  };

  /// How a step went on this rank.
  struct step_note {
    step_id step;
    uint64_t key = 0;
    bool recorded = false;
    bool replayed = false;
    /// How it diverged from the record and went on without; else empty.
    std::string divergence;
    /// This rank saw it diverge, and it fails for this.
    bool refused = false;
  };

  /// What a pipeline would replay next: what those that share modules tell each
  /// other. A wait for the peers of another pipeline ends only if that one
  /// comes to the same place.
  struct proposal {
    bool replays = false;
    step_id source;
    /// Steps of this kind of which there are records.
    std::vector<step_id> records;
    /// Tells computed orders apart.
    uint64_t order = 0;
  };

  explicit record_book(options x);

  /// Tells whether steps are recorded or replayed at all.
  bool active() const noexcept {
    return options_.static_mode || options_.fixed_order;
  }

  bool static_mode() const noexcept {
    return options_.static_mode;
  }

  /// Tells whether messages are replayed as well as the order.
  bool forms() const noexcept {
    return options_.static_mode;
  }

  bool fall_back() const noexcept {
    return options_.fall_back;
  }

  bool fixed_order() const noexcept {
    return options_.fixed_order;
  }

  /// Tells whether an answer of a replayed step is known before it comes: one
  /// that differs ends the step. (Where the order is fixed, who asks for it
  /// waits, so that the wait has its place.)
  bool foretells() const noexcept {
    return forms() && !fall_back() && !fixed_order();
  }

  // -- pp_rank 0 --------------------------------------------------------------

  /// The key of the steps from now on.
  void set_key(uint64_t x);

  proposal propose() const;

  /// The next plan is to replay what the first one of `all`, the proposals of
  /// pipelines that share modules, would; if one of them cannot, all forget
  /// what they have of this kind of step, and it is recorded.
  void agree(const std::vector<proposal>& all);

  /// Decides about the next step.
  step_plan plan(step_id step);

  /// A step took so long, in seconds.
  /// @param learnt it waited for what later steps will know before: it is
  ///        replayed only if there is nothing better
  /// @param warm_up the same holds for so many first steps of each kind
  void took(step_id step, double seconds, bool learnt = false,
            size_t warm_up = 0);

  // -- all ranks --------------------------------------------------------------

  /// @returns what is replayed, or null if the step is recorded.
  /// @throws error (internal) if this rank does not have that record
  std::shared_ptr<const step_record> begin(const step_plan& x);

  /// The step ended well.
  void recorded(const step_plan& x, step_record record);

  /// The step diverges from its record.
  void diverged(const std::string& how);

  /// The same where it must not (no `fall_back`).
  void refused();

  /// The step is over.
  void end();

  /// Of the running step, or the last one.
  step_note note() const;

  /// @returns the record of a step, or null.
  std::shared_ptr<const step_record> find(uint64_t key, step_id step) const;

  /// Replaces it, and has it replayed.
  /// @param order see `proposal::order`
  void choose(uint64_t key, step_id step, step_record record, uint64_t order);

  /// Forgets everything, between steps: the model is another one.
  void clear();

  /// Forgets all records, between steps: from now on steps go otherwise. The
  /// last step counts as little as those that learn.
  void outdate();

  /// @returns how many steps of a kind were recorded, forgotten ones too
  uint64_t recorded_steps(uint64_t key) const;

  // -- executions -------------------------------------------------------------

  /// Tells whether the running step replays a record, and did not diverge.
  bool replaying() const;

  /// How request `number`, from 0, of an execution was sent and answered in the
  /// step that is replayed: metadata of tensors, and all other values. This
  /// step's are the same, or the step fails or diverges.
  /// @param execution the request that it serves (`execution::id`)
  /// @returns null if the running step does not replay, or the record has no
  ///          such request
  std::shared_ptr<const recorded_call> sent(request_id execution,
                                            uint32_t number) const;

  /// @returns a number that promises of the running step have to exceed unless
  ///          the record numbers them; stays after a divergence.
  uint32_t last_promise() const;

private:
  struct entry {
    uint64_t key = 0;
    std::map<step_id, std::shared_ptr<const step_record>> records;
    std::map<step_id, double> seconds;
    uint64_t learnt = 0; // how many of `seconds`
    uint64_t count = 0;  // steps that were ever recorded
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
};

template <class Inspector>
bool inspect(Inspector& f, record_book::proposal& x) {
  return f.object(x).fields(
    f.field("replays", x.replays), f.field("source", x.source),
    f.field("records", x.records), f.field("order", x.order));
}

} // namespace smp
