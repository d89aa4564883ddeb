#include "partition/schedule.hpp"

#include "transport/error.hpp"

#include <algorithm>
#include <string>
#include <tuple>

namespace smp {

namespace {

error config_error(std::string text) {
  return error{error_code::config, std::move(text)};
}

} // namespace

// -- microbatch_book ----------------------------------------------------------

microbatch_book::microbatch_book(uint64_t microbatches)
  : states_(microbatches, state::unborn) {
  if (microbatches == 0)
    throw config_error("smp.microbatches must be at least 1");
}

task microbatch_book::start() {
  auto x = microbatch_id{started_++};
  at(x) = state::forward;
  ++in_forward_;
  ++alive_;
  return {x, phase::forward};
}

task microbatch_book::turn() {
  auto i = std::find(states_.begin(), states_.end(), state::turnable);
  *i = state::backward;
  --turnable_;
  auto x = microbatch_id{static_cast<uint64_t>(i - states_.begin())};
  return {x, phase::backward};
}

void microbatch_book::forward_done(microbatch_id x) {
  auto& st = at(x);
  if (st != state::forward)
    throw error{error_code::internal,
                "microbatch " + std::to_string(x.value)
                  + " reported forward done outside its forward phase"};
  st = state::turnable;
  --in_forward_;
  ++turnable_;
}

void microbatch_book::ended(microbatch_id x) {
  auto& st = at(x);
  if (st == state::unborn || st == state::ended)
    throw error{error_code::internal, "microbatch " + std::to_string(x.value)
                                        + " ended, but was not running"};
  in_forward_ -= st == state::forward;
  turnable_ -= st == state::turnable;
  --alive_;
  st = state::ended;
}

microbatch_book::state& microbatch_book::at(microbatch_id x) {
  if (x.value >= states_.size())
    throw error{error_code::internal,
                "microbatch " + std::to_string(x.value) + " of a step of "
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

// -- by name ------------------------------------------------------------------

uint64_t default_active_microbatches(std::string_view name,
                                     uint64_t microbatches,
                                     uint64_t partitions) {
  return name == "simple" ? microbatches : partitions + 2;
}

schedule_ptr make_schedule(std::string_view name, uint64_t microbatches,
                           uint64_t active) {
  if (name == "interleaved")
    return std::make_unique<interleaved_schedule>(microbatches, active);
  if (name != "simple")
    throw config_error("smp.pipeline = \"" + std::string{name}
                       + "\" is not known; allowed: \"simple\","
                         " \"interleaved\"");
  if (active < microbatches)
    throw config_error(
      "smp.active_microbatches = " + std::to_string(active)
      + " is less than smp.microbatches = " + std::to_string(microbatches)
      + ": smp.pipeline = \"simple\" starts no backward phase before every"
        " forward phase is done, and would wait for ever");
  return std::make_unique<simple_schedule>(microbatches);
}

// -- service order ------------------------------------------------------------

bool backward_first(const ready_key& x, const ready_key& y) {
  auto rank = [](const ready_key& k) {
    return std::tuple{k.what == phase::forward, k.microbatch, k.arrival};
  };
  return rank(x) < rank(y);
}

bool arrival_order(const ready_key& x, const ready_key& y) {
  return x.arrival < y.arrival;
}

} // namespace smp
