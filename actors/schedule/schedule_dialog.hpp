#pragma once

// Asks a user's schedule one question at a time; without actors.

#include "actors/protocol/schedule_events.hpp"
#include "transport/error.hpp"

#include <deque>
#include <map>
#include <optional>
#include <string>

namespace smp {

/// Sends an event to the user's actor. Called in the middle of an event, so an
/// implementation must not call back.
class schedule_asker {
public:
  virtual ~schedule_asker() = default;

  /// The answer, or why there is none, is reported under this number.
  virtual void ask(uint64_t number, const schedule_event& x) = 0;
};

/// A user's actor may answer late, wrongly or never, and must neither hang a
/// step nor corrupt it. So every answer is checked on arrival, and events that
/// happen while an answer is due are queued; of memory levels and activities,
/// only the latest of each rank is.
///
/// The first wrong answer ends the dialog: `next` throws an error that names
/// the actor and the event.
class schedule_dialog : public schedule {
public:
  /// @param name of the actor, for errors
  /// @param first number of the first question; numbers grow
  schedule_dialog(std::string name, const step_begins& begin,
                  schedule_asker& asker, uint64_t first = 0);

  // -- schedule ---------------------------------------------------------------

  /// @throws error (user_code or stalled) if an answer was wrong or missing
  std::optional<task> next() override;
  void forward_done(microbatch_id x) override;
  void ended(microbatch_id x) override;
  void rank_changed(const rank_level& x) override;

  bool deciding() const override {
    return asked_.has_value();
  }

  // -- answers ----------------------------------------------------------------
  // Answers to any question other than the latest are ignored.

  void answered(uint64_t number, const schedule_answer& x);

  /// No answer will come. @param why "threw: ...", "did not answer ..."
  void failed(uint64_t number, error_code code, const std::string& why);

  /// Tells whether an answer was wrong or is missing.
  bool broken() const noexcept {
    return static_cast<bool>(error_);
  }

  /// The event that the actor has yet to answer, if any.
  std::optional<schedule_event> question() const {
    return asked_ ? std::optional{event_} : std::nullopt;
  }

  /// The number of the next question.
  uint64_t next_number() const noexcept {
    return number_;
  }

private:
  using state = microbatch_state;

  void tell(schedule_event x);
  void ask();
  void accept(const task& x);
  void refuse(error_code code, const std::string& why);

  std::string name_;
  step_begins begin_;
  schedule_asker& asker_;
  uint64_t number_;
  std::optional<uint64_t> asked_; // the number of the open question
  schedule_event event_;          // the event it asks about
  std::deque<schedule_event> events_;
  std::deque<task> tasks_;
  std::vector<state> states_; // by microbatch
  uint64_t left_;             // microbatches that have not ended
  uint64_t in_flight_ = 0;    // phases that are running
  uint64_t alive_ = 0;
  std::map<uint32_t, rank_level> levels_; // as the actor last heard them
  failure error_;
};

} // namespace smp
