#include "actors/board/rank_board.hpp"

#include <utility>

namespace smp {

namespace {

thread_local call_slot* current_slot = nullptr;

double seconds_since(rank_board::clock::time_point x) {
  return std::chrono::duration<double>(rank_board::clock::now() - x).count();
}

const char* text_of(phase x) {
  return x == phase::forward ? "forward" : "backward";
}

/// @returns the name in "'name', forward", or nothing.
std::string quoted_name(const std::string& x) {
  auto end = x.rfind('\'');
  if (x.empty() || x[0] != '\'' || end == 0)
    return {};
  return x.substr(1, end - 1);
}

} // namespace

// -- slots --------------------------------------------------------------------

call_slot* call_slot::current() noexcept {
  return current_slot;
}

void call_slot::set_current(call_slot* x) noexcept {
  current_slot = x;
}

// -- names --------------------------------------------------------------------

rank_board::rank_board(rank_id self, uint64_t world_size)
  : self_(self), sent_(world_size), taken_(world_size) {
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

std::string rank_board::describe(const context_entry& x) const {
  auto place = ", microbatch " + std::to_string(x.microbatch.value) + ", "
               + text_of(x.what);
  auto running = x.slot->module();
  if (running != call_slot::none)
    return "module " + name_of(module_id{running}) + place;
  return (x.is_root ? "the step body" : "module " + name_of(x.module)) + place;
}

std::string rank_board::describe_wait(const context_entry& x) const {
  if (x.kind == call_kind::wait)
    return x.why;
  if (x.kind == call_kind::grant)
    return "the grant of its backward phase";
  auto name = quoted_name(x.why);
  if (name.empty() && !x.why.empty())
    return x.why + ", microbatch " + std::to_string(x.microbatch.value);
  return "module " + (name.empty() ? name_of(x.called) : name)
         + ", microbatch " + std::to_string(x.microbatch.value) + ", "
         + text_of(x.during);
}

// -- the user's thread --------------------------------------------------------

void rank_board::main_waits(completion_ptr x, const wait_reason& why) {
  note();
  std::lock_guard guard{mutex_};
  main_wait_ = std::move(x);
  main_reason_ = why;
  main_since_ = clock::now();
}

void rank_board::main_executes() {
  note();
  std::lock_guard guard{mutex_};
  main_wait_ = nullptr;
  main_since_ = clock::now();
}

void rank_board::leave() {
  std::lock_guard guard{mutex_};
  left_ = true;
}

void noting_waiter::wait(const completion_ptr& x, const wait_reason& why) {
  board_.main_waits(x, why);
  try {
    plain_.wait(x, why);
  } catch (...) {
    board_.main_executes();
    throw;
  }
  board_.main_executes();
}

// -- contexts -----------------------------------------------------------------

void rank_board::started(context_id ctx, const request& x) {
  note();
  std::lock_guard guard{mutex_};
  auto& y = contexts_[ctx] = {};
  y.serves = x.id;
  y.microbatch = x.microbatch;
  y.module = x.module;
  y.what = x.what;
  y.is_root = x.module == root_module && x.id.origin == self_;
  y.since = clock::now();
  y.slot = std::make_shared<call_slot>();
}

void rank_board::resumed(context_id ctx) {
  note();
  std::lock_guard guard{mutex_};
  if (auto i = contexts_.find(ctx); i != contexts_.end()) {
    i->second.executes = true;
    i->second.done = nullptr;
    i->second.since = clock::now();
  }
}

void rank_board::suspended(context_id ctx, const call& x) {
  note();
  std::lock_guard guard{mutex_};
  auto i = contexts_.find(ctx);
  if (i == contexts_.end())
    return;
  auto& y = i->second;
  y.executes = false;
  y.kind = x.kind;
  y.called = x.module;
  y.during = x.what;
  y.why = x.why.what;
  y.asks = {};
  y.done = x.done;
  y.answered = false;
  y.from = x.kind == call_kind::remote ? x.owner : x.why.from.value_or(no_rank);
  // A root stands at the end of its forward phase.
  if (x.kind == call_kind::grant)
    y.what = phase::backward;
  y.since = clock::now();
  suspending_ = ctx;
}

void rank_board::asked(request_id x) {
  note();
  std::lock_guard guard{mutex_};
  if (!suspending_)
    return;
  if (auto i = contexts_.find(*suspending_); i != contexts_.end())
    i->second.asks = x;
}

void rank_board::suspend_over() {
  std::lock_guard guard{mutex_};
  suspending_.reset();
}

void rank_board::answered(request_id x) {
  note();
  std::lock_guard guard{mutex_};
  for (auto& [ctx, y] : contexts_)
    if (!y.executes && y.asks == x)
      y.answered = true;
}

void rank_board::ended(context_id ctx) {
  note();
  std::lock_guard guard{mutex_};
  contexts_.erase(ctx);
}

rank_board::slot_ptr rank_board::slot_of(request_id x) const {
  std::lock_guard guard{mutex_};
  for (auto& [ctx, y] : contexts_)
    if (y.serves == x)
      return y.slot;
  return nullptr;
}

// -- readers ------------------------------------------------------------------

void rank_board::sample() {
  for (auto& [ctx, x] : contexts_)
    if (auto calls = x.slot->calls();
        std::exchange(x.calls_seen, calls) != calls) {
      ++progress_;
      if (x.executes)
        x.since = clock::now();
    }
}

uint64_t rank_board::look() {
  std::lock_guard guard{mutex_};
  sample();
  return progress_;
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
  if (main.executes) {
    main.what = "user code outside of a step";
  } else {
    main.waits_for = main_reason_.what;
    main.from = main_reason_.from.value_or(no_rank);
  }
  main.seconds = seconds_since(main_since_);
  result.activities.push_back(std::move(main));
  for (auto& [ctx, x] : contexts_) {
    activity y;
    y.who = activity::kind::context;
    y.executes = x.executes;
    y.what = describe(x);
    y.serves = x.serves;
    if (!x.executes && (x.answered || (x.done && x.done->done()))) {
      y.waits_for = "the execution token";
    } else if (!x.executes) {
      y.waits_for = describe_wait(x);
      y.from = x.from;
      y.asks = x.asks;
    }
    y.seconds = seconds_since(x.since);
    result.activities.push_back(std::move(y));
  }
  for (size_t i = 0; i < sent_.size(); ++i)
    if (sent_[i] > 0 || taken_[i] > 0)
      result.peers.push_back({rank_id{i}, sent_[i], taken_[i], 0});
  return result;
}

} // namespace smp
