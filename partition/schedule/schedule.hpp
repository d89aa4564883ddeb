#pragma once

// Schedules (paper, section 4.3) as pure functions of events: no actor, no
// clock, no thread. Rule R32: a schedule is a pair of admission (here:
// `schedule`, asked on pp_rank 0) and service order (a comparator, per rank).

#include "transport/ids.hpp"

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace smp {

/// What the PIPELINE SCHEDULER starts next; an entry of `smp.schedule.list`.
struct task {
  microbatch_id microbatch;
  phase what = phase::forward;
  auto operator<=>(const task&) const = default;
};

template <class Inspector>
bool inspect(Inspector& f, task& x) {
  return f.object(x).fields(f.field("microbatch", x.microbatch),
                            f.field("what", x.what));
}

/// Progress of a microbatch in a step.
enum class microbatch_state : uint8_t {
  not_started,
  forward,
  ready_for_backward, // forward is over, backward is not granted yet
  backward,
  ended,
};

/// @returns `x` as written in `smp.schedule.list`: [2, "backward"].
std::string to_string(const task& x);

/// Current activity of a rank of the pipeline.
struct rank_level {
  uint32_t pp_rank = 0;
  bool busy = false;
  /// Memory that the rank allocated since the step began.
  uint64_t bytes = 0;
  auto operator<=>(const rank_level&) const = default;
};

// -- admission ----------------------------------------------------------------

/// Starting every microbatch at once would keep the activations of all of them
/// alive; starting one after the other would leave all ranks but one idle. A
/// schedule decides which (microbatch, phase) starts or turns around next. An
/// instance serves one step. Its owner reports each event and then calls `next`
/// until that returns nothing.
///
/// Built-in schedules need no more than these events; `rank_changed` and
/// `deciding` are for schedules that users write.
class schedule {
public:
  virtual ~schedule() = default;

  /// @returns the next task to start now; nothing until another event.
  virtual std::optional<task> next() = 0;

  /// The body of `x` waits for the grant of its backward phase.
  /// @throws error (internal) unless `x` is in its forward phase.
  virtual void forward_done(microbatch_id x) = 0;

  /// The body of `x` returned: after its backward phase, or without one (R4).
  /// @throws error (internal) if `x` never started or ended before.
  virtual void ended(microbatch_id x) = 0;

  /// A rank of the pipeline became busy, ran out of work, or keeps more or less
  /// memory than before.
  virtual void rank_changed(const rank_level&) {
    // nop
  }

  /// A user's actor is still deciding: that `next` returns nothing does not
  /// mean that nothing will start.
  virtual bool deciding() const {
    return false;
  }
};

using schedule_ptr = std::unique_ptr<schedule>;

/// Progress of each microbatch of a step; the common part of the built-in
/// schedules.
class microbatch_book {
public:
  /// @throws error (config) if `microbatches` is 0.
  explicit microbatch_book(uint64_t microbatches);

  /// Starts the forward phase of the next microbatch.
  /// @pre `can_start()`
  task start();

  /// Starts the forward phase of `x`, for schedules that choose it themselves.
  task start(microbatch_id x);

  /// Starts the backward phase of the oldest microbatch that is ready for it.
  /// @pre `can_turn()`
  task turn();

  /// Starts the backward phase of `x`.
  /// @pre `can_turn(x)`
  task turn(microbatch_id x);

  void forward_done(microbatch_id x);

  void ended(microbatch_id x);

  bool can_start() const noexcept {
    return started_ < states_.size();
  }

  bool can_turn() const noexcept {
    return ready_for_backward_ > 0;
  }

  bool can_turn(microbatch_id x) const {
    return states_.at(x.value) == state::ready_for_backward;
  }

  bool has_ended(microbatch_id x) const {
    return states_.at(x.value) == state::ended;
  }

  uint64_t size() const noexcept {
    return states_.size();
  }

  /// Microbatches that are in their forward phase.
  uint64_t in_forward() const noexcept {
    return in_forward_;
  }

  /// Microbatches between the start of their forward phase and their end.
  uint64_t alive() const noexcept {
    return alive_;
  }

private:
  using state = microbatch_state;

  state& at(microbatch_id x);

  std::vector<state> states_;
  uint64_t started_ = 0;
  uint64_t in_forward_ = 0;
  uint64_t ready_for_backward_ = 0;
  uint64_t alive_ = 0;
};

/// GPipe: all forward phases, then all backward phases.
class simple_schedule : public schedule {
public:
  explicit simple_schedule(uint64_t microbatches);

  std::optional<task> next() override;
  void forward_done(microbatch_id x) override;
  void ended(microbatch_id x) override;

private:
  microbatch_book book_;
};

/// The paper's opportunistic rule: a backward phase as soon as one is ready,
/// else a forward phase while fewer than `active` microbatches are alive (R2).
class interleaved_schedule : public schedule {
public:
  /// @throws error (config) if `microbatches` or `active` is 0.
  interleaved_schedule(uint64_t microbatches, uint64_t active);

  std::optional<task> next() override;
  void forward_done(microbatch_id x) override;
  void ended(microbatch_id x) override;

private:
  microbatch_book book_;
  uint64_t active_;
};

/// 1F1B (Megatron, PipeDream with flushes): `active` forward phases, then one
/// backward phase per forward phase. Like interleaved, but backward phases
/// start in microbatch order, whichever is ready first, so that every rank sees
/// the same order in every step. "interleaved_1f1b" is the same with a service
/// order of its own.
class one_f_one_b_schedule : public schedule {
public:
  /// @throws error (config) if `microbatches` or `active` is 0.
  one_f_one_b_schedule(uint64_t microbatches, uint64_t active);

  std::optional<task> next() override;
  void forward_done(microbatch_id x) override;
  void ended(microbatch_id x) override;

private:
  microbatch_book book_;
  uint64_t active_;
  microbatch_id turning_; // the next one to start its backward phase
};

/// Exactly the given tasks in the given order; a task that cannot start yet
/// holds back those after it. Backward tasks of a body without a backward phase
/// are skipped (R4).
class list_schedule : public schedule {
public:
  /// @throws error (config) naming the first wrong task: a phase that is listed
  ///         twice, a backward phase before its forward phase, or one that is
  ///         missing.
  list_schedule(uint64_t microbatches, std::vector<task> tasks);

  std::optional<task> next() override;
  void forward_done(microbatch_id x) override;
  void ended(microbatch_id x) override;

private:
  microbatch_book book_;
  std::vector<task> tasks_;
  size_t at_ = 0;
};

/// A list is written for one number of microbatches, but evaluation and
/// sampling run steps with other numbers.
/// @param tasks for a step of `listed` microbatches.
/// @returns the list once per `listed` microbatches, in sequence, without the
///          tasks that a step of `microbatches` does not have.
std::vector<task> fit_list(const std::vector<task>& tasks, uint64_t listed,
                           uint64_t microbatches);

// -- by name ------------------------------------------------------------------

/// @returns the default of `smp.active_microbatches`: `microbatches` for
///          "simple" and "list", which may keep all of them alive (R2).
///          Otherwise the number that the schedule keeps alive on equal stages
///          without delays (`partitions`, or 2 `partitions` - 1 for
///          "interleaved_1f1b") plus 3: with fewer, pp_rank 0 runs dry while a
///          microbatch is in flight (measured on 2 ranks with 8 microbatches: a
///          bubble of 0.20 with 2 more, 0.145 with 3). But 1 if no rank waits
///          for another: a second one would only cost memory and cold caches (a
///          step of a small GPT took 13 % longer with 4). An actor may want
///          more even on one rank.
/// @param tensor_parallel number of ranks that share modules.
uint64_t default_active_microbatches(std::string_view name,
                                     uint64_t microbatches, uint64_t partitions,
                                     uint64_t tensor_parallel = 1);

/// @param name `smp.pipeline`, except "actor".
/// @param active bound on microbatches between forward and backward.
/// @param tasks for "list" only.
/// @throws error (config) if no schedule has this name, if the schedule would
///         wait forever with so few active microbatches (R2), or if `tasks` is
///         not a valid schedule.
schedule_ptr make_schedule(std::string_view name, uint64_t microbatches,
                           uint64_t active, std::vector<task> tasks = {});

/// @returns a schedule that starts a microbatch when the previous one ended.
schedule_ptr make_serial_schedule(uint64_t microbatches);

// -- service order ------------------------------------------------------------

/// The properties that a service order may compare.
struct ready_key {
  phase what = phase::forward;
  microbatch_id microbatch;
  /// Sequence number of the items that became ready on this rank.
  uint64_t arrival = 0;
  /// Number of segments of this phase of the microbatch that this rank has
  /// served; a segment lasts from one message to the next.
  uint64_t segment = 0;
};

/// A strict weak order; the ready queue of a rank serves the smallest first.
using service_order = std::function<bool(const ready_key& x,
                                         const ready_key& y)>;

/// Backward before forward, then older microbatches, then first come.
bool backward_first(const ready_key& x, const ready_key& y);

/// Parameters of a service order on one device.
struct service_place {
  uint32_t device = 0;
  uint32_t devices = 1;
  uint64_t microbatches = 1;
  uint32_t chunks = 1;
  /// The model chunk of each segment of a forward phase on this device.
  std::vector<uint32_t> chunk_of;
};

/// The order of interleaved 1F1B (Megatron-LM, Narayanan et al. 2021, section
/// 2.2): microbatches form groups, each as large as the number of devices. A
/// group passes through one chunk after the other, and backward phases start
/// after 2 (devices - device - 1) + (chunks - 1) devices forward segments,
/// alternating with further ones. In Megatron-LM this is a fixed sequence that
/// waits for each next item, and microbatches must be a multiple of devices.
/// Here it only ranks what is ready: equal stages yield the same sequence, any
/// number of microbatches works, and no rank waits for a message that does not
/// come.
service_order interleaved_order(service_place x);

/// @returns the service order for `smp.pipeline` on one device.
service_order make_service_order(std::string_view name, service_place x);

} // namespace smp
