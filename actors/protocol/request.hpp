#pragma once

// Requests between ranks, and the calls of an execution. Free of CAF.

#include "transport/error.hpp"
#include "transport/ids.hpp"
#include "transport/tensor_ref.hpp"
#include "transport/wait.hpp"

#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace smp {

/// The user's step body, which the PIPELINE SCHEDULER runs on its own rank.
inline constexpr module_id root_module{0};

/// Asks the owner of `module` to run it. The body, which says what exactly to
/// run and with which arguments, belongs to runtime/ and is opaque here.
struct request {
  /// `id.origin` receives the response.
  request_id id;
  step_id step;
  microbatch_id microbatch;
  module_id module;
  phase what = phase::forward;
  payload body;
  /// How many microbatches of the step were started before this one (R19).
  uint64_t start_number = 0;
  /// The requester continues meanwhile, and `after` of a later request may name
  /// this one.
  bool promised = false;
  /// Number of a promised request from the same origin to the same owner that
  /// must end before this one starts; 0: none.
  uint64_t after = 0;
  /// Results of requests from the same origin (actors/protocol/result_name.hpp)
  /// that the owner must have before this request starts (R38).
  std::vector<object_id> needs = {};
  /// Such results that the origin has released. The time of release depends on
  /// timing, so this list is not part of the body (R33).
  std::vector<object_id> released = {};
};

/// Answers exactly one request, with a value or with the first failure.
struct response {
  request_id id;
  payload body;
  failure error;
};

/// What the caller of a promise knew of its results when it sent it; it knows
/// the same when the step is replayed (R33). Opaque here.
class call_plan {
public:
  virtual ~call_plan() = default;
};

enum class call_kind : uint8_t {
  remote,  // a request to another rank
  promise, // a request to another rank; the execution continues meanwhile
  grant,   // the end of the forward phase: the SCHEDULER grants the backward
  wait,    // any other completion: a fetch, a collective (R28)
};

constexpr call_kind last_of(call_kind) noexcept {
  return call_kind::wait;
}

/// The execution stops here, returns its token, and resumes with a response. At
/// a promise it continues, and `answer` receives the response.
struct call {
  call_kind kind = call_kind::remote;
  /// remote: the owner, the module and its arguments.
  rank_id owner;
  module_id module;
  phase what = phase::forward;
  payload body;
  /// remote and promise: see `request`.
  std::vector<object_id> needs = {};
  std::vector<object_id> released = {};
  /// promise: number of the request, chosen by the caller, so that the results
  /// have names before they exist (`promise_number`).
  uint64_t number = 0;
  /// promise: receives the response; fails if there will be none.
  std::shared_ptr<awaited<response>> answer = {};
  /// remote and promise: kept in the record of the step.
  std::shared_ptr<const call_plan> plan = {};
  /// wait: the awaited completion. The response carries its failure.
  completion_ptr done;
  /// wait: numbers of this rank's requests whose results it waits for. Set if
  /// the order of the step is fixed: then it resumes in its turn.
  std::vector<uint64_t> until = {};
  /// For reports: "blocks.3, backward".
  wait_reason why;
};

/// @param name of the module, for users
/// @returns the reason of a wait for the answer to a call
inline wait_reason answer_of(const std::string& name, phase what,
                             rank_id owner) {
  return {.what = "'" + name + "', "
                  + (what == phase::forward ? "forward" : "backward"),
          .from = owner,
          .subject = {
            .what = wait_subject::kind::module, .name = name, .called = what}};
}

/// @returns the reason of the wait of a user's thread for its step
inline wait_reason end_of_step(step_id x, rank_id from) {
  return {.what = "the end of step " + std::to_string(x.value),
          .from = from,
          .subject = {.what = wait_subject::kind::step_end}};
}

/// @returns a call of another rank
inline call remote_call(rank_id owner, module_id module, phase what,
                        payload body, wait_reason why) {
  call result;
  result.owner = owner;
  result.module = module;
  result.what = what;
  result.body = std::move(body);
  result.why = std::move(why);
  return result;
}

/// @returns `x`, a remote call, as a promise: the execution does not wait
inline call promise_call(call x) {
  x.kind = call_kind::promise;
  return x;
}

/// @returns a call that resumes when `done` is done
inline call wait_call(phase what, completion_ptr done, wait_reason why) {
  call result;
  result.kind = call_kind::wait;
  result.what = what;
  result.done = std::move(done);
  result.why = std::move(why);
  return result;
}

/// @returns a call that resumes with the backward phase, on `self`
inline call grant_call(rank_id self) {
  call result;
  result.kind = call_kind::grant;
  result.owner = self;
  result.what = phase::backward;
  result.why = {"the grant of its backward phase", self};
  return result;
}

/// Result of an execution: the value of its request or the first failure.
struct outcome {
  payload body;
  failure error;
};

/// Starts one step of `microbatches` on a rank; pp_rank 0 also admits them.
struct run_step {
  step_id step;
  uint64_t microbatches = 1;
};

/// The values of a step, one per microbatch, or its first failure. The same on
/// every rank of the pipeline group (R5, R6).
struct step_report {
  step_id step;
  std::vector<payload> values;
  failure error;
};

} // namespace smp
