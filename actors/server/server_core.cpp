#include "actors/server/server_core.hpp"

#include "actors/protocol/request_number.hpp"
#include "actors/protocol/wire.hpp"

#include <algorithm>
#include <string>
#include <utility>

namespace smp {

namespace {

failure internal_failure(rank_id self, std::string text) {
  return {error_code::internal, self, {}, std::move(text)};
}

} // namespace

server_core::server_core(options x, server_output& output)
  : options_(std::move(x)),
    output_(output),
    seat_(options_.token->enroll(options_.on_token)) {
  // nop
}

server_core::~server_core() {
  options_.token->leave(seat_);
}

// -- steps --------------------------------------------------------------------

void server_core::enter(const run_step& x) {
  if (in_step() || x.step < next_)
    throw error{internal_failure(
      self(), "step " + std::to_string(x.step.value) + " begins "
                + (in_step() ? "while" : "after") + " step "
                + std::to_string(current_.step.value)
                + (in_step() ? " runs" : " ended"))};
  if (options_.records && options_.records->active()) {
    auto& plan = early_[x.step].plan;
    if (options_.leader) {
      plan = options_.records->plan(x.step);
      noted().planned(*plan);
    } else if (!plan && !down_ && !closing_) {
      current_.step = x.step;
      entering_ = x;
      return;
    }
  }
  begin(x);
}

void server_core::begin(run_step x) {
  entering_.reset();
  current_ = x;
  next_ = step_id{x.step.value + 1};
  open_ = true;
  failed_ = {};
  calls_ = 0;
  over_.clear();
  ended_.assign(x.microbatches, false);
  segments_.assign(x.microbatches, {});
  order_ = options_.services.make_order(x.microbatches);
  if (options_.sequencer)
    options_.sequencer->begin_step(x.microbatches);
  early_news news;
  if (auto i = early_.find(x.step); i != early_.end())
    news = std::move(i->second);
  early_.erase(early_.begin(), early_.upper_bound(x.step));
  prepare(news.plan);
  if (options_.leader)
    noted().run(admission());
  if (news.diverged && following())
    drop_record(*news.diverged);
  for (auto& y : news.forwards)
    end_forward(y);
  if (down_)
    fail(down_);
  else if (news.failed)
    fail(news.failed);
  for (auto& y : std::exchange(later_, {}))
    accept(std::move(y));
  if (news.done)
    close(std::move(*news.done));
  else if (down_ && !options_.leader)
    close({x.step, {}, failed_});
  pump();
}

void server_core::end_forward(const forward_over& x) {
  if (x.step >= next_) {
    early_[x.step].forwards.push_back(x);
  } else if (open_ && x.step == current_.step) {
    if (options_.sequencer)
      options_.sequencer->forward_over(x.start_number, !options_.leader);
    output_.forward_over(x);
  }
}

void server_core::end_microbatch(const microbatch_done& x) {
  auto mb = x.microbatch.value;
  // Messages before `enter` or after the end of the step are not needed: the
  // end of the step ends all its microbatches.
  if (!open_ || x.step != current_.step || mb >= ended_.size() || ended_[mb])
    return;
  ended_[mb] = true;
  output_.microbatch_over(x);
}

void server_core::fail_step(const step_failed& x) {
  if (x.step >= next_)
    early_[x.step].failed = x.error;
  else if (open_ && x.step == current_.step)
    fail(x.error);
  pump();
}

void server_core::end_step(step_report x) {
  if (x.step >= next_)
    early_[x.step].done = std::move(x);
  else if (open_ && x.step == current_.step)
    close(std::move(x));
  pump();
}

void server_core::shut_down() {
  closing_ = true;
  if (entering_)
    begin(*entering_);
  later_.clear();
  held_.clear();
  blocked_.clear();
  auto why = failure{error_code::cancelled, self(), {}, "the rank shuts down"};
  if (open_)
    close({current_.step, {}, why});
  pump();
}

// -- messages -----------------------------------------------------------------

void server_core::receive(request x) {
  note_arrival(x);
  accept(std::move(x));
  pump();
}

void server_core::accept(request x) {
  if (dead_.count(x.id.origin) > 0)
    return;
  if (x.step >= next_ && !closing_) {
    later_.push_back(std::move(x));
  } else if (!open_ || x.step != current_.step) {
    ++dropped_;
  } else if (failed_) {
    reply({x.id, {}, failed_});
  } else {
    if (recorder_ && is_root_request(x.id))
      recorder_->admitted({x.microbatch, phase::forward});
    auto behind = x.after != 0 && !is_over(x.id.origin, x.after);
    auto incomplete = !x.needs.empty() && !output_.gather(x);
    if (behind || incomplete)
      blocked_.push_back({std::move(x), behind, incomplete});
    else
      admit(std::move(x));
  }
}

void server_core::admit(request x) {
  auto modules = options_.sequencer ? options_.services.ordered_modules(x)
                                    : std::vector<module_id>{};
  if (modules.empty())
    push(std::move(x), {});
  else
    admit_in_turn({std::move(x), std::move(modules)});
}

void server_core::admit_in_turn(held_request x) {
  try {
    if (options_.sequencer->open(x.modules, x.what.start_number,
                                 x.what.microbatch))
      push(std::move(x.what), std::move(x.modules));
    else
      held_.push_back(std::move(x));
  } catch (const error& e) {
    fail(e.cause());
    reply({x.what.id, {}, e.cause()});
  }
}

void server_core::receive(response x) {
  auto i = pending_.find(x.id);
  if (i == pending_.end()) {
    ++unknown_;
    return;
  }
  if (auto why = refusal(i->second))
    x = {x.id, {}, std::move(why)};
  note_reply(i->second, x);
  if (recorder_ && !x.error && i->second.kind == call_kind::grant)
    recorder_->admitted(
      {contexts_.at(i->second.context).current->microbatch, phase::backward});
  settle(i, std::move(x));
  pump();
}

void server_core::complete(const completed& x) {
  if (complete_blocked(x))
    return pump();
  auto i = pending_.find(x.id);
  if (i == pending_.end()) // cancelled meanwhile
    return;
  settle(i, {x.id, {}, x.error});
  pump();
}

void server_core::answer_undelivered(const undelivered& x) {
  answer({x.id, {}, x.error});
}

void server_core::settle(pending_map::iterator i, response x) {
  auto entry = i->second;
  pending_.erase(i);
  if (x.error)
    fail(x.error);
  if (!entry.answer)
    push(entry, std::move(x));
  else if (x.error)
    entry.answer->fail(std::move(x.error));
  else
    entry.answer->set_value(std::move(x));
}

void server_core::rank_down(const failure& x) {
  if (!dead_.insert(x.rank).second)
    return;
  if (!down_)
    down_ = x;
  std::erase_if(later_, [&](auto& y) { return y.id.origin == x.rank; });
  std::erase_if(held_, [&](auto& y) { return y.what.id.origin == x.rank; });
  std::erase_if(blocked_, [&](auto& y) { return y.what.id.origin == x.rank; });
  std::erase_if(ready_, [&](auto& y) {
    auto req = std::get_if<request>(&y.work);
    return req != nullptr && req->id.origin == x.rank;
  });
  if (entering_) // its plan may never come
    begin(*entering_);
  else if (open_) {
    fail(x);
    // A live rank may have left the step already and would never answer.
    cancel_pending(failed_, [](auto&) { return true; });
    if (!options_.leader)
      close({current_.step, {}, failed_});
  }
  pump();
}

void server_core::token_granted() {
  hold_ = hold::held;
  pump();
}

void server_core::reached() {
  --launched_;
  options_.board.device_works(num_launched());
  pump();
}

void server_core::turns_moved() {
  auto held = std::exchange(held_, {});
  // Oldest first: a request that enters may keep the others waiting.
  std::stable_sort(held.begin(), held.end(), [](auto& x, auto& y) {
    return x.what.start_number < y.what.start_number;
  });
  for (auto& x : held)
    if (failed_)
      reply({x.what.id, {}, failed_});
    else
      admit_in_turn(std::move(x));
  pump();
}

void server_core::decided(request_id x) {
  undecided_.erase(x);
  pump();
}

// -- contexts -----------------------------------------------------------------

failure server_core::refusal(const call& x) const {
  if (failed_)
    return failed_;
  if (!open_)
    return {error_code::cancelled, self(), {}, "the step is over"};
  auto asks = x.kind == call_kind::remote || x.kind == call_kind::promise;
  if (asks && x.owner == self())
    return internal_failure(self(), "a request to the own rank");
  if (x.kind == call_kind::grant && !options_.leader)
    return internal_failure(self(), "only pp_rank 0 may ask for a grant");
  return {};
}

/// A response of another rank may name any request number.
failure server_core::refusal(const pending_call& asked) const {
  if (asked.kind != call_kind::wait)
    return {};
  return {error_code::protocol,
          self(),
          {},
          "malformed response: the answer does not belong to a request"};
}

void server_core::suspend(context_id ctx, call x) {
  auto pos = contexts_.find(ctx);
  if (pos == contexts_.end())
    return;
  auto& entry_of_context = pos->second;
  free_token(ctx);
  auto entry = pending_call{ctx, x.kind, x.what, {}, in_order(x)};
  auto refused = refusal(x);
  std::optional<uint32_t> known; // number in the record
  auto& cur = *entry_of_context.current;
  if (!refused && following() && entry.in_order) {
    auto y = replay_->call(cur.id, x);
    if (y.divergence.empty())
      known = y.number;
    else
      refused = leave_record(cur, y.divergence);
  }
  auto id = request_id{self(),
                       request_number(cur.step, known ? *known : ++calls_)};
  options_.board.parked(ctx, x.kind == call_kind::remote ? id : request_id{});
  if (refused) {
    fail(refused);
    push(entry, {id, {}, refused});
    return pump();
  }
  // Register first: the answer may arrive before the next line is done.
  pending_.emplace(id, entry);
  if (recorder_ && entry.in_order)
    recorder_->called(cur.id, id, x);
  switch (x.kind) {
    case call_kind::remote:
    case call_kind::promise: // never here: see `issue`
      ask(ctx, x.owner, request_of(entry_of_context, id.number, x));
      break;
    case call_kind::grant:
      // Its promises run on other ranks, which may be idle until its backward
      // phase begins: serve nothing before the SCHEDULER has decided.
      if (!entry_of_context.promises.empty())
        undecided_.insert(id);
      noted().forward_done({id, cur.microbatch});
      break;
    case call_kind::wait:
      if (recorder_ && !entry.in_order)
        recorder_->waits(cur.id);
      if (following() && !entry.in_order)
        replay_->waits(cur.id, x.why.for_peers);
      output_.report_done(id, x.done);
  }
  pump();
}

void server_core::finish(context_id ctx, outcome x) {
  auto pos = contexts_.find(ctx);
  if (pos == contexts_.end())
    return;
  auto& [code, current, entered, promises] = pos->second;
  auto cur = *std::exchange(current, std::nullopt);
  free_token(ctx);
  warm_ = ctx;
  options_.board.idle(ctx);
  auto id = cur.id;
  auto promised = cur.promised;
  if (!entered.empty())
    options_.sequencer->leave(std::exchange(entered, {}), cur.start_number);
  if (following() && !x.error)
    if (auto divergence = replay_->end(id); !divergence.empty())
      if (auto why = leave_record(cur, divergence))
        x = {{}, std::move(why)};
  if (x.error)
    fail(x.error);
  reply({id, std::move(x.body), std::move(x.error)});
  if (promised)
    end_promised(id);
  check_over();
  pump();
}

void server_core::lose(context_id ctx, const std::string& why) {
  auto i = contexts_.find(ctx);
  if (i == contexts_.end())
    return;
  auto cur = std::move(i->second.current);
  contexts_.erase(i);
  free_token(ctx);
  options_.board.lost(ctx);
  // Keep promises, which are answered as before: others may wait for them.
  std::erase_if(pending_, [&](auto& y) {
    return y.second.context == ctx && !y.second.answer;
  });
  std::erase_if(ready_, [&](auto& y) { return y.context == ctx; });
  if (cur) {
    auto err = internal_failure(self(), "a WORKER CONTEXT died: " + why);
    fail(err);
    reply({cur->id, {}, err});
  }
  check_over();
  pump();
}

// -- properties ---------------------------------------------------------------

size_t server_core::num_busy() const noexcept {
  auto busy = [](auto& x) { return x.second.current.has_value(); };
  return static_cast<size_t>(
    std::count_if(contexts_.begin(), contexts_.end(), busy));
}

// -- failures and ends --------------------------------------------------------

void server_core::fail(const failure& x) {
  if (failed_ || !open_)
    return;
  failed_ = x;
  note_failure();
  recorder_.reset();
  if (replay_)
    replay_->diverge(); // what unwinds does not follow the record
  noted().failed({current_.step, x});
  answer_queued(x);
  // Nothing is granted any more, and a wait may be for what failed.
  cancel_pending(x, [](auto& y) {
    return y.kind == call_kind::grant || y.kind == call_kind::wait;
  });
}

void server_core::close(step_report x) {
  open_ = false;
  if (replay_)
    replay_->diverge();
  auto why = x.error;
  if (!why)
    why = {error_code::cancelled, self(), {}, "the step is over"};
  else if (!failed_)
    failed_ = why;
  report_ = std::move(x);
  answer_queued(why);
  cancel_pending(why, [](auto&) { return true; });
  check_over();
}

void server_core::answer_queued(const failure& x) {
  auto queued = std::stable_partition(ready_.begin(), ready_.end(),
                                      [](auto& y) { return y.context; });
  for (auto i = queued; i != ready_.end(); ++i)
    reply({std::get<request>(i->work).id, {}, x});
  ready_.erase(queued, ready_.end());
  for (auto& y : std::exchange(held_, {}))
    reply({y.what.id, {}, x});
  for (auto& y : std::exchange(blocked_, {}))
    reply({y.what.id, {}, x});
}

template <class Predicate>
void server_core::cancel_pending(const failure& x, Predicate pred) {
  for (auto i = pending_.begin(); i != pending_.end();) {
    if (!pred(i->second)) {
      ++i;
      continue;
    }
    auto [id, entry] = *i;
    i = pending_.erase(i);
    if (entry.answer)
      entry.answer->fail(x);
    else
      push(entry, {id, {}, x});
  }
}

void server_core::reply(response x) {
  // For this rank the cancellation is a consequence of its shutdown; for the
  // others it means that the rank is lost (R39).
  if (closing_ && x.id.origin != self()
      && x.error.code == error_code::cancelled)
    x.error.code = error_code::rank_down;
  if (dead_.count(x.id.origin) > 0)
    return;
  note_answer(x);
  options_.board.note();
  answer(std::move(x));
}

void server_core::answer(response x) {
  if (x.id.origin == self())
    return output_.body_over(std::move(x));
  auto to = x.id.origin;
  fabric::sent_callback on_sent;
  // If a failure cannot be sent, there is no simpler answer to send instead.
  if (!x.error)
    on_sent = output_.on_answered(x.id);
  options_.fabric.send(to, encode(std::move(x)), std::move(on_sent));
}

void server_core::check_over() {
  if (!report_ || num_busy() > 0)
    return;
  for (uint64_t mb = 0; mb < ended_.size(); ++mb)
    if (!ended_[mb])
      output_.microbatch_over({current_.step, microbatch_id{mb}});
  auto report = std::move(*report_);
  report_.reset();
  if (options_.sequencer)
    options_.sequencer->end_step(!report.error);
  end_record(!report.error);
  noted().step_over(std::move(report));
}

} // namespace smp
