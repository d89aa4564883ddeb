#pragma once

// What a PIPELINE SCHEDULER decides, without actors: it plays a schedule
// against a step that may fail at any moment.

#include "actors/protocol/messages.hpp"
#include "partition/schedule.hpp"

#include <functional>
#include <map>
#include <memory>
#include <vector>

namespace smp {

class recorded_schedule;

/// What a `step_driver` makes happen. Called in the middle of an event, so it
/// must not call back.
class driver_output {
public:
  virtual ~driver_output() = default;

  /// Runs the step body for a microbatch on this rank.
  virtual void start(request x) = 0;

  /// Lets a microbatch begin its backward phase.
  virtual void grant(response x) = 0;

  virtual void forward_over(const smp::forward_over& x) = 0;

  virtual void microbatch_over(const microbatch_done& x) = 0;

  /// The schedule itself failed.
  virtual void failed(const step_failed& x) = 0;

  virtual void step_over(step_report x) = 0;
};

/// Makes the schedule of one step.
using schedule_factory = std::function<schedule_ptr(uint64_t microbatches)>;

/// A schedule only says what may start; somebody has to number its requests,
/// remember who waits for a grant, and stop asking once the step failed. After
/// a failure nothing starts, and the report waits for what was started.
class step_driver {
public:
  step_driver(rank_id self, schedule_factory make, driver_output& output);

  ~step_driver();

  /// @pre no step is running
  void run(const scheduled_step& x);

  void forward_done(const smp::forward_done& x);

  /// A microbatch ended, with its value or with a failure.
  void ended(response x);

  /// The step failed elsewhere; grants are cancelled there as well.
  void failed(const step_failed& x);

  /// The step does not go on as recorded.
  void diverged(const step_diverged& x);

  void rank_changed(const rank_report& x);

  /// A schedule that was `deciding` has decided.
  void decided();

  step_id step() const noexcept {
    return report_.step;
  }

  /// Microbatches that were started and did not end.
  size_t num_running() const noexcept {
    return running_.size();
  }

  /// Microbatches that did not end.
  uint64_t num_left() const noexcept {
    return left_;
  }

private:
  template <class F>
  void guarded(F f);
  void start(const task& x);
  void fail(failure x);
  void end_forward(microbatch_id x);
  void pump();

  rank_id self_;
  schedule_factory make_;
  driver_output& output_;
  std::unique_ptr<schedule> schedule_;
  recorded_schedule* recorded_ = nullptr; // `schedule_`, if it is one
  step_report report_;
  bool active_ = false;
  uint64_t left_ = 0;
  uint64_t turns_ = 0;
  std::map<microbatch_id, uint64_t> in_forward_; // with their turns
  std::vector<bool> started_;                    // by microbatch
  std::map<request_id, microbatch_id> running_;
  std::map<microbatch_id, request_id> waiting_; // for their grant
};

} // namespace smp
