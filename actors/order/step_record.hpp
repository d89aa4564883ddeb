#pragma once

// What one rank did in one step (R33), as plain data: `step_recorder` writes
// it, `step_replay` follows it.

#include "actors/protocol/request.hpp"
#include "partition/schedule/schedule.hpp"

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace smp {

/// A call of an execution: a request, the end of its forward phase, or a wait
/// that has a place in the order, at each of which it returned the token; or a
/// promise, after which it continued.
struct recorded_call {
  call_kind kind = call_kind::remote;
  uint32_t number = 0; // of the request
  rank_id owner;
  module_id module;
  phase what = phase::forward;
  std::string name; // as `wait_reason` has it
  /// See `call::plan`.
  std::shared_ptr<const call_plan> plan = {};
  /// For a wait: numbers of requests in step 0, see `call::until`.
  std::vector<uint64_t> until = {};
};

/// Tells whether a call has a place in the order of a step.
inline bool in_order(const call& x) noexcept {
  return x.kind != call_kind::wait || !x.until.empty();
}

/// Tells whether `y` has the same destination as `x`.
bool same_place(const recorded_call& x, const call& y);

/// The step body of a microbatch, or a call from another rank.
struct recorded_execution {
  request_id id; // `without_step`
  microbatch_id microbatch;
  phase what = phase::forward;
  bool promised = false;
  uint64_t after = 0;           // see `request::after`
  std::vector<object_id> needs; // of the recorded step
  std::vector<recorded_call> calls;
  /// By segment, from one call that returned the token to the next, numbered
  /// from 0: true if others held the token while the execution waited within it
  /// for something else, such as a fetch or its turn.
  std::vector<bool> interrupted;
};

/// One segment of an execution that got the token.
struct served_segment {
  uint32_t execution = 0;
  uint32_t segment = 0;
  bool operator==(const served_segment&) const = default;
};

struct step_record {
  uint64_t microbatches = 0;
  std::vector<recorded_execution> executions;
  /// By `recorded_execution::id`.
  std::map<request_id, uint32_t> by_id;
  /// Segments in the order in which they were served.
  std::vector<served_segment> order;
  /// On pp_rank 0: tasks in the order in which they were started or granted.
  std::vector<task> admission;
  /// Highest number of a request of this rank, and of a promise; the latter
  /// without its `promise_bit`.
  uint32_t last_number = 0;
  uint32_t last_promise = 0;

  /// @returns the execution of a request, of any step, or null.
  const recorded_execution* find(request_id x) const;
};

} // namespace smp
