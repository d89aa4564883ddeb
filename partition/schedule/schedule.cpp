#include "partition/schedule/schedule.hpp"

#include "partition/schedule/promised_order.hpp"
#include "transport/error.hpp"

#include <algorithm>
#include <string>
#include <tuple>

namespace smp {

// -- microbatch_book ----------------------------------------------------------

microbatch_book::microbatch_book(uint64_t microbatches)
  : states_(microbatches, state::not_started) {
  if (microbatches == 0)
    throw config_error("smp.microbatches must be at least 1");
}

task microbatch_book::start() {
  return start(microbatch_id{started_});
}

task microbatch_book::start(microbatch_id x) {
  at(x) = state::forward;
  ++started_;
  ++in_forward_;
  ++alive_;
  return {x, phase::forward};
}

task microbatch_book::turn() {
  auto i = std::find(states_.begin(), states_.end(), state::ready_for_backward);
  return turn(microbatch_id{static_cast<uint64_t>(i - states_.begin())});
}

task microbatch_book::turn(microbatch_id x) {
  at(x) = state::backward;
  --ready_for_backward_;
  return {x, phase::backward};
}

void microbatch_book::forward_done(microbatch_id x) {
  auto& st = at(x);
  if (st != state::forward)
    throw error{error_code::internal,
                "microbatch " + std::to_string(x.value)
                  + " reported forward done outside its forward phase"};
  st = state::ready_for_backward;
  --in_forward_;
  ++ready_for_backward_;
}

void microbatch_book::ended(microbatch_id x) {
  auto& st = at(x);
  if (st == state::not_started || st == state::ended)
    throw error{error_code::internal, "microbatch " + std::to_string(x.value)
                                        + " ended, but was not running"};
  in_forward_ -= st == state::forward;
  ready_for_backward_ -= st == state::ready_for_backward;
  --alive_;
  st = state::ended;
}

microbatch_book::state& microbatch_book::at(microbatch_id x) {
  if (x.value >= states_.size())
    throw error{error_code::internal, "microbatch " + std::to_string(x.value)
                                        + " of a step of "
                                        + std::to_string(states_.size())};
  return states_[x.value];
}

// -- simple -------------------------------------------------------------------

simple_schedule::simple_schedule(uint64_t microbatches) : book_(microbatches) {
  // nop
}

std::optional<task> simple_schedule::next() {
  if (book_.can_start())
    return book_.start();
  if (book_.in_forward() == 0 && book_.can_turn())
    return book_.turn();
  return std::nullopt;
}

void simple_schedule::forward_done(microbatch_id x) {
  book_.forward_done(x);
}

void simple_schedule::ended(microbatch_id x) {
  book_.ended(x);
}

// -- interleaved --------------------------------------------------------------

interleaved_schedule::interleaved_schedule(uint64_t microbatches,
                                           uint64_t active)
  : book_(microbatches), active_(active) {
  if (active == 0)
    throw config_error("smp.active_microbatches must be at least 1");
}

std::optional<task> interleaved_schedule::next() {
  if (book_.can_turn())
    return book_.turn();
  if (book_.can_start() && book_.alive() < active_)
    return book_.start();
  return std::nullopt;
}

void interleaved_schedule::forward_done(microbatch_id x) {
  book_.forward_done(x);
}

void interleaved_schedule::ended(microbatch_id x) {
  book_.ended(x);
}

// -- 1f1b ---------------------------------------------------------------------

one_f_one_b_schedule::one_f_one_b_schedule(uint64_t microbatches,
                                           uint64_t active)
  : book_(microbatches), active_(active) {
  if (active == 0)
    throw config_error("smp.active_microbatches must be at least 1");
}

std::optional<task> one_f_one_b_schedule::next() {
  while (turning_.value < book_.size() && book_.has_ended(turning_))
    ++turning_.value;
  if (turning_.value < book_.size() && book_.can_turn(turning_))
    return book_.turn(microbatch_id{turning_.value++});
  if (book_.can_start() && book_.alive() < active_)
    return book_.start();
  return std::nullopt;
}

void one_f_one_b_schedule::forward_done(microbatch_id x) {
  book_.forward_done(x);
}

void one_f_one_b_schedule::ended(microbatch_id x) {
  book_.ended(x);
}

// -- list ---------------------------------------------------------------------

list_schedule::list_schedule(uint64_t microbatches, std::vector<task> tasks)
  : book_(microbatches), tasks_(std::move(tasks)) {
  std::vector<bool> forward(microbatches);
  std::vector<bool> backward(microbatches);
  for (size_t i = 0; i < tasks_.size(); ++i) {
    auto refuse = [&](const std::string& why) {
      throw config_error("smp.schedule.list[" + std::to_string(i)
                         + "] = " + to_string(tasks_[i]) + ": " + why);
    };
    auto x = tasks_[i].microbatch.value;
    auto is_forward = tasks_[i].what == phase::forward;
    auto& seen = is_forward ? forward : backward;
    if (x >= microbatches)
      refuse("smp.microbatches = " + std::to_string(microbatches));
    if (seen[x])
      refuse("it stands there twice");
    if (!is_forward && !forward[x])
      refuse("its forward phase must come first");
    seen[x] = true;
  }
  for (auto* seen : {&forward, &backward})
    for (uint64_t x = 0; x < microbatches; ++x)
      if (!(*seen)[x])
        throw config_error(
          "smp.schedule.list lacks "
          + to_string({microbatch_id{x},
                       seen == &forward ? phase::forward : phase::backward}));
}

std::optional<task> list_schedule::next() {
  while (at_ < tasks_.size()) {
    auto& x = tasks_[at_];
    if (x.what == phase::forward) {
      ++at_;
      return book_.start(x.microbatch);
    }
    if (!book_.has_ended(x.microbatch)) {
      if (!book_.can_turn(x.microbatch))
        return std::nullopt;
      ++at_;
      return book_.turn(x.microbatch);
    }
    ++at_;
  }
  return std::nullopt;
}

void list_schedule::forward_done(microbatch_id x) {
  book_.forward_done(x);
}

void list_schedule::ended(microbatch_id x) {
  book_.ended(x);
}

std::vector<task> fit_list(const std::vector<task>& tasks, uint64_t listed,
                           uint64_t microbatches) {
  std::vector<task> result;
  for (uint64_t first = 0; first < microbatches; first += listed)
    for (auto x : tasks) {
      x.microbatch.value += first;
      if (x.microbatch.value < microbatches)
        result.push_back(x);
    }
  return result;
}

// -- by name ------------------------------------------------------------------

uint64_t default_active_microbatches(std::string_view name,
                                     uint64_t microbatches, uint64_t partitions,
                                     uint64_t tensor_parallel) {
  if (name == "simple" || name == "list")
    return microbatches;
  if (partitions == 1 && tensor_parallel == 1 && name != "actor")
    return 1;
  return (name == "interleaved_1f1b" ? 2 * partitions - 1 : partitions) + 3;
}

schedule_ptr make_schedule(std::string_view name, uint64_t microbatches,
                           uint64_t active, std::vector<task> tasks) {
  if (name == "interleaved")
    return std::make_unique<interleaved_schedule>(microbatches, active);
  if (name == "1f1b" || name == "interleaved_1f1b")
    return std::make_unique<one_f_one_b_schedule>(microbatches, active);
  if (name != "simple" && name != "list")
    throw config_error("smp.pipeline = \"" + std::string{name}
                       + "\" is not known; allowed: \"simple\","
                         " \"interleaved\", \"1f1b\", \"interleaved_1f1b\","
                         " \"list\"");
  if (active < microbatches)
    throw config_error(
      "smp.active_microbatches = " + std::to_string(active)
      + " is less than smp.microbatches = " + std::to_string(microbatches)
      + ": smp.pipeline = \"" + std::string{name}
      + "\" may keep all of them alive, and would wait for ever");
  if (name == "list")
    return std::make_unique<list_schedule>(microbatches, std::move(tasks));
  return std::make_unique<simple_schedule>(microbatches);
}

schedule_ptr make_serial_schedule(uint64_t microbatches) {
  return std::make_unique<interleaved_schedule>(microbatches, uint64_t{1});
}

std::string to_string(const task& x) {
  return "[" + std::to_string(x.microbatch.value)
         + (x.what == phase::forward ? ", \"forward\"]" : ", \"backward\"]");
}

// -- service order ------------------------------------------------------------

bool backward_first(const ready_key& x, const ready_key& y) {
  auto rank = [](const ready_key& k) {
    return std::tuple{k.what == phase::forward, k.microbatch, k.arrival};
  };
  return rank(x) < rank(y);
}

service_order interleaved_order(service_place x) {
  // Forward segments before the first backward one, if nothing is late.
  auto warm_up = 2 * uint64_t{x.devices - x.device - 1}
                 + uint64_t{x.chunks - 1} * x.devices;
  return sequence_order(std::move(x), warm_up);
}

service_order make_service_order(std::string_view name, service_place x) {
  if (name == "interleaved_1f1b")
    return interleaved_order(std::move(x));
  return backward_first;
}

} // namespace smp
