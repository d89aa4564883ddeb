#include "actors/server/microbatch_sequencer.hpp"

#include <algorithm>

namespace smp {

void microbatch_sequencer::set_modules(std::vector<module_id> xs) {
  std::lock_guard guard{mutex_};
  std::map<module_id, gate> gates;
  for (auto x : xs) {
    auto known = gates_.extract(x);
    gates.emplace(x, known ? std::move(known.mapped()) : gate{});
  }
  gates_.swap(gates);
}

bool microbatch_sequencer::used() const {
  std::lock_guard guard{mutex_};
  return !gates_.empty();
}

void microbatch_sequencer::on_moved(std::function<void()> f) {
  std::lock_guard guard{mutex_};
  on_moved_ = std::move(f);
}

// -- steps --------------------------------------------------------------------

void microbatch_sequencer::begin_step(uint64_t microbatches) {
  std::lock_guard guard{mutex_};
  over_.assign(microbatches, false);
  held_.clear();
  for (auto& [id, x] : gates_)
    x.counts.assign(microbatches, 0);
}

void microbatch_sequencer::end_step(bool complete) {
  std::lock_guard guard{mutex_};
  held_.clear();
  if (!complete)
    return;
  for (auto& [id, x] : gates_) {
    if (x.counts.empty() || x.varies || id == module_id{})
      continue;
    auto [least, most] = std::minmax_element(x.counts.begin(), x.counts.end());
    if (*most == 0)
      continue;
    // One that makes fewer calls than expected holds the next ones until its
    // forward phase is over, which is right; one that makes more is not.
    if (x.expected ? *most > *x.expected : *least != *most)
      x.varies = true;
    if (x.varies)
      x.expected.reset();
    else if (!x.expected)
      x.expected = *most;
  }
}

// -- microbatches -------------------------------------------------------------

bool microbatch_sequencer::passed(const gate& x, uint64_t turn) const {
  return over_[turn] || (x.expected && x.counts[turn] >= *x.expected);
}

bool microbatch_sequencer::is_open(const std::vector<module_id>& xs,
                        uint64_t turn) const {
  for (auto id : xs) {
    auto i = gates_.find(id);
    if (i == gates_.end())
      continue;
    auto last = std::min<uint64_t>(turn, i->second.counts.size());
    for (uint64_t older = 0; older < last; ++older)
      if (!passed(i->second, older))
        return false;
  }
  return true;
}

void microbatch_sequencer::note_overtaken(const std::vector<module_id>& xs,
                               uint64_t turn) {
  for (auto id : xs) {
    auto i = gates_.find(id);
    if (i == gates_.end() || i->second.varies)
      continue;
    auto& counts = i->second.counts;
    auto younger = turn + 1 < counts.size()
                     ? counts.begin() + static_cast<ptrdiff_t>(turn) + 1
                     : counts.end();
    if (std::any_of(younger, counts.end(), [](auto n) { return n > 0; })) {
      i->second.varies = i->second.overtaken = true;
      i->second.expected.reset();
    }
  }
}

bool microbatch_sequencer::open(const std::vector<module_id>& xs, uint64_t turn) {
  std::lock_guard guard{mutex_};
  if (!is_open(xs, turn)) {
    asked_ = true;
    return false;
  }
  note_overtaken(xs, turn);
  return true;
}

completion_ptr microbatch_sequencer::opening(const std::vector<module_id>& xs,
                                  uint64_t turn) {
  std::lock_guard guard{mutex_};
  if (is_open(xs, turn)) {
    note_overtaken(xs, turn);
    return nullptr;
  }
  auto result = std::make_shared<completion>();
  held_.push_back({xs, turn, result});
  return result;
}

void microbatch_sequencer::leave(const std::vector<module_id>& xs, uint64_t turn) {
  std::unique_lock guard{mutex_};
  for (auto id : xs) {
    auto i = gates_.find(id);
    if (i == gates_.end() || turn >= i->second.counts.size())
      continue;
    ++i->second.counts[turn];
    ++i->second.calls;
  }
  moved(std::move(guard));
}

void microbatch_sequencer::forward_over(uint64_t turn) {
  std::unique_lock guard{mutex_};
  if (turn >= over_.size())
    return;
  over_[turn] = true;
  moved(std::move(guard));
}

std::vector<completion_ptr> microbatch_sequencer::take_opened() {
  std::vector<completion_ptr> result;
  std::erase_if(held_, [&](auto& x) {
    if (!is_open(x.modules, x.turn))
      return false;
    result.push_back(std::move(x.opened));
    return true;
  });
  return result;
}

/// Wakes whoever may go on, without the lock: they may call back.
void microbatch_sequencer::moved(std::unique_lock<std::mutex> guard) {
  auto opened = take_opened();
  auto f = std::exchange(asked_, false) ? on_moved_ : nullptr;
  guard.unlock();
  for (auto& x : opened)
    x->set();
  if (f)
    f();
}

// -- reports ------------------------------------------------------------------

uint64_t microbatch_sequencer::calls(module_id x) const {
  std::lock_guard guard{mutex_};
  auto i = gates_.find(x);
  return i == gates_.end() ? 0 : i->second.calls;
}

std::vector<module_id> microbatch_sequencer::take_overtaken() {
  std::lock_guard guard{mutex_};
  std::vector<module_id> result;
  for (auto& [id, x] : gates_)
    if (std::exchange(x.overtaken, false))
      result.push_back(id);
  return result;
}

} // namespace smp
