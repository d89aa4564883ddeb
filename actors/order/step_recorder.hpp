#pragma once

#include "actors/order/step_record.hpp"

namespace smp {

/// Records what a rank does in a step. An execution is identified by the
/// request that it serves.
class step_recorder {
public:
  explicit step_recorder(uint64_t microbatches);

  /// On pp_rank 0: the SCHEDULER decided to start or grant `x`.
  void admitted(const task& x);

  // -- the token --------------------------------------------------------------

  /// A request starts.
  void started(const request& x);

  /// An execution resumes after a request or a grant.
  void resumed(request_id execution);

  /// An execution waits for something other than a request or a grant.
  void waits(request_id execution);

  /// It resumes after that wait.
  void woken(request_id execution);

  /// An execution sent the request or promise `id`, or waits for its grant
  /// under that id.
  void called(request_id execution, request_id id, const call& x);

  /// @returns the record; nothing else may be called afterwards.
  step_record take();

private:
  recorded_execution& at(request_id execution);

  step_record record_;
  std::map<request_id, uint64_t> waiting_; // `served_` when the wait began
  uint64_t served_ = 0;
};

} // namespace smp
