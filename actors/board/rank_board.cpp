#include "actors/board/rank_board.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace smp {

namespace {

double seconds_since(rank_board::clock::time_point x) {
  return std::chrono::duration<double>(rank_board::clock::now() - x).count();
}

const char* text_of(phase x) {
  return x == phase::forward ? "forward" : "backward";
}

/// @returns the reason of a wait at this moment.
wait_reason reason_now(const wait_reason& x) {
  return x.now ? x.now() : x;
}

/// Names what executes, and what it may wait for without telling.
std::string with_lock(std::string what) {
  constexpr double long_time = 1; // in seconds; threads take turns in less
  if (auto held = ask_for_lock(); held > long_time)
    what += fmt::format(" (no thread can take Python's lock for {:.0f} s)",
                        held);
  return what;
}

bool is_answer(const wait_reason& x) {
  return x.subject.what == wait_subject::kind::module;
}

} // namespace

// -- names --------------------------------------------------------------------

rank_board::rank_board(rank_id self, uint64_t world_size,
                       std::shared_ptr<flight_record> record)
  : self_(self),
    record_(record ? std::move(record) : std::make_shared<flight_record>(self)),
    sent_(world_size),
    taken_(world_size) {
  // nop
}

void rank_board::name_modules(std::function<std::string(module_id)> f) {
  std::lock_guard guard{mutex_};
  names_ = std::move(f);
}

std::string rank_board::path_of(module_id x) const {
  std::lock_guard guard{mutex_};
  return names_ ? names_(x) : std::string{};
}

std::string rank_board::name_of(module_id x) const {
  if (!names_)
    return std::to_string(x.value);
  auto name = names_(x);
  return name.empty() ? "(the whole model)" : name;
}

std::string rank_board::describe(module_id x, microbatch_id m,
                                 phase what) const {
  std::lock_guard guard{mutex_};
  return "module " + name_of(x) + ", microbatch " + std::to_string(m.value)
         + ", " + text_of(what);
}

std::string rank_board::brief(const context_view& x) const {
  auto& y = x.current;
  auto running = x.slot ? x.slot->module() : call_slot::none;
  auto is_root = y.module == root_module && y.id.origin == self_;
  auto result = (y.what == phase::forward ? "FWD mb" : "BWD mb")
                + std::to_string(y.microbatch.value);
  if (running != call_slot::none)
    result += ' ' + name_of(module_id{running});
  else if (!is_root)
    result += ' ' + name_of(y.module);
  return result;
}

std::string rank_board::describe(const context_view& x) const {
  auto& y = x.current;
  auto place = ", microbatch " + std::to_string(y.microbatch.value) + ", "
               + text_of(y.what);
  auto running = x.slot ? x.slot->module() : call_slot::none;
  if (running != call_slot::none)
    return "module " + name_of(module_id{running}) + place;
  auto is_root = y.module == root_module && y.id.origin == self_;
  return (is_root ? "the step body" : "module " + name_of(y.module)) + place;
}

std::string rank_board::describe_wait(const context_view& x,
                                      const wait_reason& why) const {
  auto& y = x.waits_for;
  if (y.kind == call_kind::grant)
    return "the grant of its backward phase";
  auto place = ", microbatch " + std::to_string(x.current.microbatch.value);
  // The phase of a promise may differ from that of the waiting execution.
  if (is_answer(why))
    return "module " + why.subject.name + place + ", "
           + text_of(why.subject.called);
  if (y.kind == call_kind::wait)
    return why.what;
  if (!why.what.empty())
    return why.what + place;
  return "module " + name_of(y.module) + place + ", " + text_of(y.what);
}

std::string rank_board::brief_wait(const context_view& x,
                                   const wait_reason& why) const {
  auto& y = x.waits_for;
  if (y.kind == call_kind::grant)
    return "its backward phase";
  if (is_answer(why))
    return why.subject.name;
  return why.what.empty() ? name_of(y.module) : why.what;
}

activity rank_board::describe(const context_entry& x, bool executes) const {
  auto look = x.look();
  activity result;
  result.who = activity::kind::context;
  result.executes = executes;
  result.what = executes ? with_lock(describe(look)) : describe(look);
  result.brief = brief(look);
  result.serves = look.current.id;
  if (!executes) {
    auto& y = look.waits_for;
    if (x.answered || (y.done && y.done->done())) {
      result.waits_for = result.awaits = "the execution token";
    } else {
      auto why = reason_now(y.why);
      result.waits_for = describe_wait(look, why);
      result.subject = why.subject;
      result.awaits = brief_wait(look, why);
      result.from = y.kind == call_kind::remote ? y.owner
                                                : why.from.value_or(no_rank);
      result.asks = why.asks ? request_id{self_, *why.asks} : x.asks;
    }
  }
  result.seconds = seconds_since(std::max(look.since, x.moved));
  return result;
}

// -- how the time goes --------------------------------------------------------

void rank_board::account() {
  auto now = clock::now();
  if (executing_ || !main_wait_)
    busy_ += now - accounted_;
  accounted_ = now;
}

void rank_board::step_ended(double bubble) {
  std::lock_guard guard{mutex_};
  bubble_ = bubble;
}

rank_board::usage rank_board::look_at_usage() const {
  using seconds = std::chrono::duration<double>;
  std::lock_guard guard{mutex_};
  // Read the clock under the lock: `busy_` may grow while this thread waits for
  // the lock, and could then exceed the lifetime of the rank.
  auto now = clock::now();
  auto busy = busy_;
  if (executing_ || !main_wait_)
    busy += now - accounted_;
  return {seconds{now - made_}.count(), seconds{busy}.count(), bubble_};
}

// -- the user's thread --------------------------------------------------------

void rank_board::main_waits(completion_ptr x, const wait_reason& why) {
  note();
  std::lock_guard guard{mutex_};
  account();
  main_wait_ = std::move(x);
  main_reason_ = why;
  main_since_ = clock::now();
}

void rank_board::main_executes() {
  note();
  std::lock_guard guard{mutex_};
  account();
  main_wait_ = nullptr;
  main_since_ = clock::now();
}

void rank_board::leave() {
  std::lock_guard guard{mutex_};
  left_ = true;
}

void noting_waiter::wait(const completion_ptr& x, const wait_reason& why) {
  board_.main_waits(x, why);
  // The step itself is in the record.
  std::optional<flight_activity> noted;
  if (why.subject.what != wait_subject::kind::step_end)
    noted.emplace(board_.record(), board_.record().name(why));
  try {
    plain_.wait(x, why);
  } catch (...) {
    board_.main_executes();
    throw;
  }
  board_.main_executes();
}

// -- contexts -----------------------------------------------------------------

void rank_board::add(context_id ctx, looker look) {
  std::lock_guard guard{mutex_};
  contexts_[ctx].look = std::move(look);
}

void rank_board::executes(context_id ctx) {
  note();
  std::lock_guard guard{mutex_};
  account();
  executing_ = ctx;
  auto& x = contexts_[ctx];
  x.asks = {};
  x.answered = false;
  x.moved = clock::now();
}

void rank_board::parked(context_id ctx, request_id asks) {
  note();
  std::lock_guard guard{mutex_};
  if (executing_ == ctx) {
    account();
    executing_.reset();
  }
  if (auto i = contexts_.find(ctx); i != contexts_.end())
    i->second.asks = asks;
}

void rank_board::answered(context_id ctx) {
  note();
  std::lock_guard guard{mutex_};
  if (auto i = contexts_.find(ctx); i != contexts_.end())
    i->second.answered = true;
}

void rank_board::idle(context_id ctx) {
  note();
  std::lock_guard guard{mutex_};
  if (executing_ == ctx) {
    account();
    executing_.reset();
  }
}

void rank_board::lost(context_id ctx) {
  idle(ctx);
  std::lock_guard guard{mutex_};
  contexts_.erase(ctx);
}

void rank_board::device_works(uint64_t executions) {
  note();
  std::lock_guard guard{mutex_};
  // What is done was the oldest.
  if (launched_ == 0 || executions < launched_)
    launched_since_ = clock::now();
  launched_ = executions;
}

// -- readers ------------------------------------------------------------------

void rank_board::sample() {
  for (auto& [ctx, x] : contexts_) {
    auto slot = x.look().slot;
    auto calls = slot ? slot->calls() : 0;
    if (std::exchange(x.calls_seen, calls) == calls || calls == 0)
      continue;
    ++progress_;
    if (executing_ == ctx)
      x.moved = clock::now();
  }
}

uint64_t rank_board::look() {
  std::lock_guard guard{mutex_};
  sample();
  // So that it is known when the first report is due.
  if (std::exchange(looked_at_, progress_.load()) == progress_)
    ask_for_lock();
  return progress_;
}

void rank_board::main_ends_step(bool x) {
  std::lock_guard guard{mutex_};
  main_ends_step_ = x;
}

rank_view rank_board::view() {
  std::lock_guard guard{mutex_};
  sample();
  rank_view result;
  result.rank = self_;
  result.progress = progress_;
  result.left = left_;
  activity main;
  main.executes = !main_wait_ || main_wait_->done();
  main.ends_step = main_ends_step_;
  if (main.executes) {
    main.what = with_lock("user code outside of a step");
    main.brief = "user code";
  } else {
    auto why = reason_now(main_reason_);
    main.awaits = why.what;
    main.waits_for = std::move(why.what);
    main.subject = std::move(why.subject);
    main.from = why.from.value_or(no_rank);
    if (main.subject.what == wait_subject::kind::device) {
      main.executes = true;
      main.what = std::exchange(main.waits_for, {});
      main.brief = std::exchange(main.awaits, {});
    }
  }
  main.seconds = seconds_since(main_since_);
  result.activities.push_back(std::move(main));
  for (auto& [ctx, x] : contexts_)
    if (auto executes = executing_ == ctx;
        executes || x.look().state != context_state::idle)
      result.activities.push_back(describe(x, executes));
  if (launched_ > 0) {
    activity device;
    device.who = activity::kind::device;
    device.executes = true;
    device.what = "what " + std::to_string(launched_) + " execution"
                  + (launched_ == 1 ? "" : "s") + " launched on its device";
    device.brief = "device";
    device.seconds = seconds_since(launched_since_);
    result.activities.push_back(std::move(device));
  }
  for (size_t i = 0; i < sent_.size(); ++i)
    if (sent_[i] > 0 || taken_[i] > 0)
      result.peers.push_back({rank_id{i}, sent_[i], taken_[i], 0});
  return result;
}

} // namespace smp
