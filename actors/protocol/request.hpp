#pragma once

// What a rank asks of another and what an execution can do. Free of CAF.

#include "transport/error.hpp"
#include "transport/ids.hpp"
#include "transport/tensor_ref.hpp"
#include "transport/wait.hpp"

#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace smp {

/// The user's step body: what the PIPELINE SCHEDULER asks its own rank to run.
inline constexpr module_id root_module{0};

/// Asks the owner of `module` to run it. What to run exactly and with which
/// arguments is up to runtime/ and opaque here.
struct request {
  /// `id.origin` gets the response.
  request_id id;
  step_id step;
  microbatch_id microbatch;
  module_id module;
  phase what = phase::forward;
  payload body;
  /// How many microbatches of the step were started before this one (R19).
  uint64_t turn = 0;
  /// The requester goes on meanwhile and may name this request in `after` of
  /// another one.
  bool promised = false;
  /// A promised request of the same origin to the same owner, which must have
  /// ended before this one starts; 0: none.
  uint64_t after = 0;
  /// Results of the same origin's requests (actors/protocol/result_name.hpp)
  /// that must be on the owner before this starts (R38).
  std::vector<object_id> needs = {};
  /// Such results that the origin let go of: when depends on timing, so it is
  /// no part of the body (R33).
  std::vector<object_id> released = {};
};

/// Answers exactly one request, with a value or with the first cause.
struct response {
  request_id id;
  payload body;
  failure error;
};

/// What the caller of a promise knew of its results before it sent it: it knows
/// the same where the step is replayed (R33). Opaque here.
class call_memo {
public:
  virtual ~call_memo() = default;
};

enum class call_kind : uint8_t {
  remote,  // a request to another rank
  promise, // a request to another rank; the execution goes on meanwhile
  grant,   // the end of the forward phase: the SCHEDULER grants the backward
  wait,    // anything else that becomes done: a fetch, a collective (R28)
};

constexpr call_kind last_of(call_kind) noexcept {
  return call_kind::wait;
}

/// An execution stops here, gives its token back, and goes on with a response;
/// not so at a promise, whose response goes to `answer`.
struct call {
  call_kind kind = call_kind::remote;
  /// remote: who runs it, what, and with which arguments.
  rank_id owner;
  module_id module;
  phase what = phase::forward;
  payload body;
  /// remote and promise: see `request`.
  std::vector<object_id> needs = {};
  std::vector<object_id> released = {};
  /// promise: number of the request, chosen by the caller: it names the results
  /// before they are there (`promise_number`).
  uint64_t number = 0;
  /// promise: what takes the response; fails if there will be none.
  std::shared_ptr<awaited<response>> answer = {};
  /// remote and promise: kept in the record of the step.
  std::shared_ptr<const call_memo> memo = {};
  /// wait: what it waits for. The response carries its failure.
  completion_ptr done;
  /// wait: numbers of the own requests whose results it waits for, where the
  /// order of a step is fixed: then it goes on in its turn.
  std::vector<uint64_t> until = {};
  /// For reports: "blocks.3, backward".
  wait_reason why;
};

/// @returns a call of another rank
/// @param why the rank that is waited for is `owner`
inline call remote_call(rank_id owner, module_id module, phase what,
                        payload body, std::string why) {
  call result;
  result.owner = owner;
  result.module = module;
  result.what = what;
  result.body = std::move(body);
  result.why = {std::move(why), owner};
  return result;
}

/// @returns `x`, a call of another rank, as one that nobody waits for
inline call promise_call(call x) {
  x.kind = call_kind::promise;
  return x;
}

/// @returns a call that goes on when `done` is
inline call wait_call(phase what, completion_ptr done, wait_reason why) {
  call result;
  result.kind = call_kind::wait;
  result.what = what;
  result.done = std::move(done);
  result.why = std::move(why);
  return result;
}

/// @returns a call that goes on with the backward phase, on `self`
inline call grant_call(rank_id self) {
  call result;
  result.kind = call_kind::grant;
  result.owner = self;
  result.what = phase::backward;
  result.why = {"the grant of its backward phase", self};
  return result;
}

/// What an execution ends with: the value of its request or the first cause.
struct outcome {
  payload body;
  failure error;
};

/// Orders one step of `microbatches`; on pp_rank 0 it also runs them.
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
