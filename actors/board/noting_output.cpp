#include "actors/board/noting_output.hpp"

#include "actors/board/rank_board.hpp"

#include <utility>

namespace smp {

// -- who has the token --------------------------------------------------------

void noting_output::start(context_id ctx, request x) {
  board_.executes(ctx);
  inner_.start(ctx, std::move(x));
}

void noting_output::resume(context_id ctx, response x) {
  board_.executes(ctx);
  inner_.resume(ctx, std::move(x));
}

void noting_output::parked(context_id ctx, request_id x) {
  board_.parked(ctx, x);
  inner_.parked(ctx, x);
}

void noting_output::answered(context_id ctx) {
  board_.answered(ctx);
  inner_.answered(ctx);
}

void noting_output::idle(context_id ctx) {
  board_.idle(ctx);
  inner_.idle(ctx);
}

void noting_output::lost(context_id ctx) {
  board_.lost(ctx);
  inner_.lost(ctx);
}

// -- what counts as progress --------------------------------------------------

void noting_output::ask(rank_id owner, request x) {
  board_.note();
  inner_.ask(owner, std::move(x));
}

void noting_output::ask(rank_id owner, recorded_request x) {
  board_.note();
  inner_.ask(owner, std::move(x));
}

void noting_output::answer(response x) {
  board_.note();
  inner_.answer(std::move(x));
}

void noting_output::answer(recorded_response x) {
  board_.note();
  inner_.answer(std::move(x));
}

void noting_output::forward_done(const smp::forward_done& x) {
  board_.note();
  inner_.forward_done(x);
}

void noting_output::run(const scheduled_step& x) {
  board_.note();
  inner_.run(x);
}

void noting_output::planned(const step_plan& x) {
  board_.note();
  inner_.planned(x);
}

void noting_output::diverged(const step_diverged& x) {
  board_.note();
  inner_.diverged(x);
}

void noting_output::failed(const step_failed& x) {
  board_.note();
  inner_.failed(x);
}

void noting_output::step_over(step_report x) {
  board_.note();
  inner_.step_over(std::move(x));
}

// -- what follows from something that was noted -------------------------------

void noting_output::report_done(request_id id, const completion_ptr& x) {
  inner_.report_done(id, x);
}

bool noting_output::gather(const request& x) {
  return inner_.gather(x);
}

void noting_output::forward_over(const smp::forward_over& x) {
  inner_.forward_over(x);
}

void noting_output::microbatch_over(const microbatch_done& x) {
  inner_.microbatch_over(x);
}

void noting_output::activity(bool busy) {
  inner_.activity(busy);
}

} // namespace smp
