#include "actors/schedule/schedule_dialog.hpp"

#include <utility>

namespace smp {

// -- events -------------------------------------------------------------------

namespace {

struct event_text {
  std::string operator()(const step_begins& x) const {
    return "step " + std::to_string(x.step.value) + " begins";
  }

  std::string operator()(const task_started& x) const {
    return to_string(x.what) + " started";
  }

  std::string operator()(const forward_ended& x) const {
    return of("forward ended", x.microbatch);
  }

  std::string operator()(const backward_ready& x) const {
    return of("backward ready", x.microbatch);
  }

  std::string operator()(const backward_ended& x) const {
    return of("backward ended", x.microbatch);
  }

  std::string operator()(const memory_level& x) const {
    return "rank " + std::to_string(x.pp_rank) + " keeps "
           + std::to_string(x.bytes) + " bytes";
  }

  std::string operator()(const rank_activity& x) const {
    return "rank " + std::to_string(x.pp_rank)
           + (x.busy ? " is busy" : " is idle");
  }

  static std::string of(const char* what, microbatch_id x) {
    return std::string{what} + ", microbatch " + std::to_string(x.value);
  }
};

} // namespace

std::string to_string(const schedule_event& x) {
  return std::visit(event_text{}, x);
}

// -- schedule -----------------------------------------------------------------

schedule_dialog::schedule_dialog(std::string name, const step_begins& begin,
                                 schedule_asker& asker, uint64_t first)
  : name_(std::move(name)),
    begin_(begin),
    asker_(asker),
    number_(first),
    states_(begin.microbatches),
    left_(begin.microbatches) {
  tell(begin);
}

std::optional<task> schedule_dialog::next() {
  if (error_)
    throw error{error_};
  if (tasks_.empty())
    return std::nullopt;
  auto result = tasks_.front();
  tasks_.pop_front();
  return result;
}

void schedule_dialog::forward_done(microbatch_id x) {
  states_.at(x.value) = state::ready_for_backward;
  --in_flight_;
  tell(forward_ended{x});
  tell(backward_ready{x});
}

void schedule_dialog::ended(microbatch_id x) {
  auto& st = states_.at(x.value);
  auto no_backward = st == state::forward;
  in_flight_ -= st == state::forward || st == state::backward;
  st = state::ended;
  --alive_;
  --left_;
  if (no_backward)
    tell(forward_ended{x});
  tell(backward_ended{x});
}

void schedule_dialog::rank_changed(const rank_level& x) {
  auto& known = levels_[x.pp_rank];
  auto busy = x.busy != known.busy;
  auto bytes = x.bytes != known.bytes;
  known = x;
  auto is_old = [&x](const schedule_event& y) {
    auto level = std::get_if<memory_level>(&y);
    auto activity = std::get_if<rank_activity>(&y);
    return (level && level->pp_rank == x.pp_rank)
           || (activity && activity->pp_rank == x.pp_rank);
  };
  if (std::erase_if(events_, is_old) > 0)
    busy = bytes = true; // not reported yet
  if (bytes)
    tell(memory_level{x.pp_rank, x.bytes});
  if (busy)
    tell(rank_activity{x.pp_rank, x.busy});
}

// -- answers ------------------------------------------------------------------

void schedule_dialog::answered(uint64_t number, const schedule_answer& x) {
  if (asked_ != number || error_)
    return;
  asked_.reset();
  if (x.next)
    accept(*x.next);
  else if (in_flight_ == 0 && events_.empty() && left_ > 0)
    refuse(error_code::stalled, "waits although nothing is in flight");
  ask();
}

void schedule_dialog::failed(uint64_t number, error_code code,
                             const std::string& why) {
  if (asked_ != number || error_)
    return;
  asked_.reset();
  refuse(code, why);
}

void schedule_dialog::accept(const task& x) {
  auto what = "answers " + to_string(x);
  auto i = x.microbatch.value;
  auto forward = x.what == phase::forward;
  if (!forward && x.what != phase::backward)
    return refuse(error_code::schedule, "answers a phase that does not exist");
  if (i >= states_.size())
    return refuse(error_code::schedule, what + " in a step of "
                                          + std::to_string(states_.size())
                                          + " microbatches");
  auto& st = states_[i];
  if (forward ? st != state::not_started
              : st == state::backward || st == state::ended)
    return refuse(error_code::schedule, what + " a second time");
  if (!forward && st != state::ready_for_backward)
    return refuse(error_code::schedule,
                  what + ", which is not ready for its backward phase");
  if (forward && alive_ >= begin_.active)
    return refuse(error_code::schedule,
                  what + ", and so keeps " + std::to_string(alive_ + 1)
                    + " microbatches alive, smp.active_microbatches = "
                    + std::to_string(begin_.active));
  st = forward ? state::forward : state::backward;
  alive_ += forward;
  ++in_flight_;
  tasks_.push_back(x);
  tell(task_started{x});
}

void schedule_dialog::refuse(error_code code, const std::string& why) {
  error_ = {code,
            no_rank,
            {},
            "schedule actor \"" + name_ + "\" " + why
              + " (event: " + to_string(event_) + ")"};
  events_.clear();
  tasks_.clear();
}

// -- questions ----------------------------------------------------------------

void schedule_dialog::tell(schedule_event x) {
  events_.push_back(std::move(x));
  ask();
}

void schedule_dialog::ask() {
  if (asked_ || error_ || events_.empty())
    return;
  event_ = std::move(events_.front());
  events_.pop_front();
  asked_ = number_++;
  asker_.ask(*asked_, event_);
}

} // namespace smp
