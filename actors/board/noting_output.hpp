#pragma once

// Records on the rank's board what its MODULE SERVER does.

#include "actors/protocol/server_output.hpp"

namespace smp {

class rank_board;

/// The stall search must know who holds the token, who was answered, and that
/// anything happened at all: each call notes it, then calls `inner`.
class noting_output final : public server_output {
public:
  /// @param inner,board must outlive this object
  noting_output(server_output& inner, rank_board& board)
    : inner_(inner), board_(board) {
    // nop
  }

  void start(context_id ctx, request x) override;
  void resume(context_id ctx, response x) override;
  void parked(context_id ctx, request_id x) override;
  void answered(context_id ctx) override;
  void idle(context_id ctx) override;
  void lost(context_id ctx) override;
  void ask(rank_id owner, request x) override;
  void ask(rank_id owner, recorded_request x) override;
  void answer(response x) override;
  void answer(recorded_response x) override;
  void forward_done(const smp::forward_done& x) override;
  void run(const scheduled_step& x) override;
  void planned(const step_plan& x) override;
  void diverged(const step_diverged& x) override;
  void failed(const step_failed& x) override;
  void report_done(request_id id, const completion_ptr& x) override;
  bool gather(const request& x) override;
  void forward_over(const smp::forward_over& x) override;
  void microbatch_over(const microbatch_done& x) override;
  void activity(bool busy) override;
  void step_over(step_report x) override;

private:
  server_output& inner_;
  rank_board& board_;
};

} // namespace smp
