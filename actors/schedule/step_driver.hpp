#pragma once

// The logic of a PIPELINE SCHEDULER, without actors: runs a schedule on a step
// that may fail at any moment.

#include "actors/protocol/messages.hpp"
#include "partition/schedule/schedule.hpp"

#include <functional>
#include <map>
#include <memory>
#include <vector>

namespace smp {

class recorded_schedule;

/// The effects of a `step_driver`. Called in the middle of an event, so an
/// implementation must not call back into it.
class driver_output {
public:
  virtual ~driver_output() = default;

  /// Runs the step body of a microbatch on this rank.
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

/// A schedule only decides what may start. The driver numbers requests, keeps
/// track of waits for grants, and stops asking once the step has failed. After
/// a failure nothing starts, and the report waits for what is still running.
class step_driver {
public:
  step_driver(rank_id self, schedule_factory make, driver_output& output);

  ~step_driver();

  /// @pre no step is running
  void run(const scheduled_step& x);

  void forward_done(const smp::forward_done& x);

  /// A microbatch ended, with a value or with a failure.
  void ended(response x);

  /// The step failed elsewhere; the MODULE SERVER cancels pending grants.
  void failed(const step_failed& x);

  /// The step diverges from its record.
  void diverged(const step_diverged& x);

  void rank_changed(const rank_report& x);

  /// A schedule that was `deciding` has decided.
  void decided();

  step_id step() const noexcept {
    return report_.step;
  }

  /// Microbatches that have started but not ended.
  size_t num_running() const noexcept {
    return running_.size();
  }

  /// Microbatches that have not ended.
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
