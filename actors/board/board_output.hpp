#pragma once

#include "actors/board/rank_board.hpp"
#include "actors/protocol/server_output.hpp"

#include <memory>
#include <utility>

namespace smp {

/// The search for stalls has to know who holds the token, who was answered, and
/// that anything happened at all. This notes it on a `rank_board` before it
/// passes it on.
class board_output final : public server_output {
public:
  board_output(server_output& inner, std::shared_ptr<rank_board> board)
    : inner_(inner), board_(std::move(board)) {
    // nop
  }

  void start(context_id ctx, request x) override {
    board_->executes(ctx);
    inner_.start(ctx, std::move(x));
  }

  void resume(context_id ctx, response x) override {
    board_->executes(ctx);
    inner_.resume(ctx, std::move(x));
  }

  void parked(context_id ctx, request_id x) override {
    board_->parked(ctx, x);
    inner_.parked(ctx, x);
  }

  void answered(context_id ctx) override {
    board_->answered(ctx);
    inner_.answered(ctx);
  }

  void idle(context_id ctx) override {
    board_->idle(ctx);
    inner_.idle(ctx);
  }

  void lost(context_id ctx) override {
    board_->lost(ctx);
    inner_.lost(ctx);
  }

  void ask(rank_id owner, request x) override {
    board_->note();
    inner_.ask(owner, std::move(x));
  }

  void ask(rank_id owner, recorded_request x) override {
    board_->note();
    inner_.ask(owner, std::move(x));
  }

  void answer(response x) override {
    board_->note();
    inner_.answer(std::move(x));
  }

  void answer(recorded_response x) override {
    board_->note();
    inner_.answer(std::move(x));
  }

  void forward_done(const smp::forward_done& x) override {
    board_->note();
    inner_.forward_done(x);
  }

  void run(const scheduled_step& x) override {
    board_->note();
    inner_.run(x);
  }

  void planned(const step_plan& x) override {
    board_->note();
    inner_.planned(x);
  }

  void diverged(const step_diverged& x) override {
    board_->note();
    inner_.diverged(x);
  }

  void failed(const step_failed& x) override {
    board_->note();
    inner_.failed(x);
  }

  void report_done(request_id id, const completion_ptr& x) override {
    inner_.report_done(id, x);
  }

  bool gather(const request& x) override {
    return inner_.gather(x);
  }

  void microbatch_over(const microbatch_done& x) override {
    inner_.microbatch_over(x);
  }

  void activity(bool busy) override {
    inner_.activity(busy);
  }

  void step_over(step_report x) override {
    board_->note();
    inner_.step_over(std::move(x));
  }

private:
  server_output& inner_;
  std::shared_ptr<rank_board> board_;
};

} // namespace smp
