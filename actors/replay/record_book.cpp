#include "actors/replay/record_book.hpp"

#include <algorithm>
#include <limits>
#include <utility>

namespace smp {

record_book::record_book(options x) : options_(x) {
  // nop
}

// -- pp_rank 0 ----------------------------------------------------------------

void record_book::set_key(uint64_t x) {
  std::lock_guard guard{mutex_};
  key_ = x;
}

step_plan record_book::plan(step_id step) {
  std::lock_guard guard{mutex_};
  step_plan result{step, step_plan::mode::record, key_, {}};
  auto& x = use(key_);
  // A fixed order is computed, and so chosen, by whoever runs the steps.
  if (!x.chosen && !options_.fixed_order
      && x.seconds.size() >= options_.steps + std::min(x.learnt, max_learnt)) {
    auto fastest = std::min_element(
      x.seconds.begin(), x.seconds.end(),
      [](auto& a, auto& b) { return a.second < b.second; });
    choose(x, fastest->first);
  }
  if (x.chosen) {
    result.what = step_plan::mode::replay;
    result.source = *x.chosen;
  }
  return result;
}

void record_book::took(step_id step, double seconds, bool learnt,
                       size_t warm_up) {
  std::lock_guard guard{mutex_};
  for (auto& x : entries_) {
    // One that failed has no record.
    if (x.chosen || !x.records.contains(step) || x.seconds.contains(step))
      continue;
    auto worse = learnt || x.count <= warm_up;
    x.seconds.emplace(step, worse ? std::numeric_limits<double>::infinity()
                                  : seconds);
    x.learnt += worse;
  }
}

// -- all ranks ----------------------------------------------------------------

std::shared_ptr<const step_record> record_book::begin(const step_plan& x) {
  std::lock_guard guard{mutex_};
  note_ = {x.step, x.key, false, false, {}};
  last_promise_ = 0;
  auto& y = use(x.key);
  if (x.what == step_plan::mode::record) {
    note_.recorded = true;
    return nullptr;
  }
  auto i = y.records.find(x.source);
  if (i == y.records.end())
    throw error{error_code::internal, "step " + std::to_string(x.step.value)
                                        + " replays step "
                                        + std::to_string(x.source.value)
                                        + ", of which this rank has no record"};
  choose(y, x.source);
  note_.replayed = true;
  replayed_ = y.records.at(x.source);
  last_promise_ = replayed_->last_promise;
  return replayed_;
}

void record_book::recorded(const step_plan& x, step_record record) {
  std::lock_guard guard{mutex_};
  auto& y = use(x.key);
  ++y.count;
  y.records[x.step] = std::make_shared<const step_record>(std::move(record));
}

void record_book::diverged(const std::string& how) {
  std::lock_guard guard{mutex_};
  note_.divergence = how;
  replayed_ = nullptr;
}

void record_book::end() {
  std::lock_guard guard{mutex_};
  replayed_ = nullptr;
}

record_book::step_note record_book::note() const {
  std::lock_guard guard{mutex_};
  return note_;
}

std::shared_ptr<const step_record> record_book::find(uint64_t key,
                                                     step_id step) const {
  std::lock_guard guard{mutex_};
  if (auto* x = find(key))
    if (auto i = x->records.find(step); i != x->records.end())
      return i->second;
  return nullptr;
}

void record_book::choose(uint64_t key, step_id step, step_record record) {
  std::lock_guard guard{mutex_};
  auto& x = use(key);
  x.records[step] = std::make_shared<const step_record>(std::move(record));
  choose(x, step);
}

void record_book::clear() {
  std::lock_guard guard{mutex_};
  entries_.clear();
}

void record_book::outdate() {
  std::lock_guard guard{mutex_};
  for (auto& x : entries_)
    x = {x.key, {}, {}, 0, x.count, {}};
}

uint64_t record_book::recorded_steps(uint64_t key) const {
  std::lock_guard guard{mutex_};
  auto* x = find(key);
  return x ? x->count : 0;
}

// -- executions ---------------------------------------------------------------

bool record_book::replaying() const {
  std::lock_guard guard{mutex_};
  return replayed_ != nullptr;
}

std::shared_ptr<const recorded_call> record_book::sent(request_id execution,
                                                       uint32_t number) const {
  std::lock_guard guard{mutex_};
  auto* x = replayed_ ? replayed_->find(execution) : nullptr;
  if (x == nullptr)
    return nullptr;
  for (auto& y : x->calls)
    if ((y.kind == call_kind::remote || y.kind == call_kind::promise)
        && number-- == 0)
      return {replayed_, &y};
  return nullptr;
}

uint32_t record_book::last_promise() const {
  std::lock_guard guard{mutex_};
  return last_promise_;
}

// -- helpers ------------------------------------------------------------------

const record_book::entry* record_book::find(uint64_t key) const {
  auto i = std::find_if(entries_.begin(), entries_.end(),
                        [&](auto& x) { return x.key == key; });
  return i == entries_.end() ? nullptr : &*i;
}

record_book::entry& record_book::use(uint64_t key) {
  auto i = std::find_if(entries_.begin(), entries_.end(),
                        [&](auto& x) { return x.key == key; });
  if (i != entries_.end())
    entries_.splice(entries_.begin(), entries_, i);
  else
    entries_.push_front({key, {}, {}, 0, 0, {}});
  if (entries_.size() > max_keys)
    entries_.pop_back();
  return entries_.front();
}

void record_book::choose(entry& x, step_id step) {
  x.chosen = step;
  x.seconds.clear();
  std::erase_if(x.records, [&](auto& y) { return y.first != step; });
}

} // namespace smp
