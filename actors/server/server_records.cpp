// Recording and replaying steps: the part of `server_core` that R33 adds.

#include "actors/server/server_core.hpp"

#include <algorithm>
#include <utility>

namespace smp {

// -- steps --------------------------------------------------------------------

void server_core::plan(const step_plan& x) {
  if (x.step < next_)
    return;
  early_[x.step].plan = x;
  if (entering_ && entering_->step == x.step)
    begin(*entering_);
}

void server_core::prepare(const std::optional<step_plan>& plan) {
  plan_ = plan;
  recorder_.reset();
  replay_.reset();
  if (!plan_)
    return;
  auto& records = *options_.records;
  try {
    if (auto record = records.begin(*plan_)) {
      // Numbers that the record does not use are free.
      calls_ = record->last_number;
      replay_.emplace(std::move(record), plan_->same_order);
    } else {
      recorder_.emplace(current_.microbatches);
    }
  } catch (const error& e) {
    fail(e.cause());
  }
}

scheduled_step server_core::admission() const {
  scheduled_step result{current_};
  // A recorded admission may start a microbatch before the previous one ends.
  auto serial = options_.sequencer && options_.sequencer->serial();
  if (replay_ && !serial)
    result.recorded = replay_->record().admission;
  // With a fixed order, timing must not decide anything.
  result.serial = serial || (recorder_ && options_.records->fixed_order());
  return result;
}

void server_core::end_record(bool complete) {
  if (!plan_)
    return;
  if (recorder_ && complete)
    options_.records->recorded(*plan_, recorder_->take());
  recorder_.reset();
  options_.records->end();
}

// -- divergences --------------------------------------------------------------

/// @returns why the step fails; nothing if it continues without the record,
/// which it cannot do where other pipelines rely on the order.
failure server_core::leave_record(const request& at, const std::string& how) {
  auto& records = *options_.records;
  auto module = options_.services.module_name(at.module);
  auto text = records.describe(at.microbatch, how);
  if (plan_->same_order) {
    // A divergence while the code unwinds means nothing.
    if (!failed_)
      records.refused();
    return {error_code::unsupported, self(), module,
            text + " (write smp.deterministic_server = false)"};
  }
  step_diverged news{current_.step, failure{error_code::unsupported, self(),
                                            module, std::move(text)}
                                      .describe()};
  drop_record(news);
  if (!options_.leader)
    noted().diverged(news);
  return {};
}

void server_core::diverge(const step_diverged& x) {
  if (x.step >= next_)
    early_[x.step].diverged = x;
  else if (open_ && x.step == current_.step && following())
    drop_record(x);
  pump();
}

/// Continues the step without its record, here and, through pp_rank 0, on all
/// other ranks.
void server_core::drop_record(const step_diverged& x) {
  replay_->diverge();
  options_.records->diverged(x.text);
  if (options_.leader)
    noted().diverged(x);
}

// -- order --------------------------------------------------------------------

server_core::ready_list::iterator server_core::next_item() {
  auto may_run = [this](auto& x) {
    if (!following() || x.after_wait)
      return true;
    return x.context ? replay_->may_resume(contexts_.at(*x.context).current->id)
                     : replay_->next_is(std::get<request>(x.work));
  };
  auto result = ready_.end();
  for (auto i = ready_.begin(); i != ready_.end(); ++i)
    if (may_run(*i) && (result == ready_.end() || order_(i->key, result->key)))
      result = i;
  return result;
}

void server_core::note_served(const ready_item& x) {
  auto note = [&x, this](auto& book) {
    if (!x.context)
      return book.started(std::get<request>(x.work));
    auto id = contexts_.at(*x.context).current->id;
    x.after_wait ? book.woken(id) : book.resumed(id);
  };
  if (recorder_)
    note(*recorder_);
  if (following())
    note(*replay_);
}

} // namespace smp
