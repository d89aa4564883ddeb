#include "actors/server/microbatch_sequencer.hpp"

#include <algorithm>
#include <iterator>
#include <memory>

namespace smp {

microbatch_sequencer::microbatch_sequencer(
  rank_id self, std::function<std::string(module_id)> name)
  : self_(self), name_(std::move(name)) {
  // nop
}

void microbatch_sequencer::set_modules(const std::vector<module_id>& xs,
                                       const std::set<module_id>& sure,
                                       bool serial) {
  std::lock_guard guard{mutex_};
  serial_ = serial;
  std::map<module_id, gate> gates;
  for (auto x : xs) {
    auto known = gates_.extract(x);
    auto& y = gates[x] = known ? std::move(known.mapped()) : gate{};
    // The step body has passed only when its forward phase is over.
    y.sure = y.sure || sure.contains(x) || x == module_id{};
    if (y.sure)
      y.expected.reset();
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
  overtaken_.clear();
  called_late_.clear();
  held_.clear();
  for (auto& [id, x] : gates_) {
    x.entered.assign(microbatches, 0);
    x.left.assign(microbatches, 0);
    x.late.assign(microbatches, 0);
  }
}

void microbatch_sequencer::end_step(bool complete) {
  std::lock_guard guard{mutex_};
  held_.clear();
  if (!complete)
    return;
  for (auto& [id, x] : gates_) {
    if (x.left.empty() || x.sure)
      continue;
    auto [least, most] = std::minmax_element(x.left.begin(), x.left.end());
    if (*most == 0)
      continue;
    // A microbatch with fewer calls than expected holds the next ones until its
    // forward phase is over, which is safe; one with more calls is not.
    x.sure = x.expected ? *most > *x.expected : *least != *most;
    if (x.sure)
      x.expected.reset();
    else if (!x.expected)
      x.expected = *most;
  }
}

std::set<module_id> microbatch_sequencer::called_late() const {
  std::lock_guard guard{mutex_};
  return called_late_;
}

void microbatch_sequencer::set_serial(const std::set<module_id>& xs) {
  std::lock_guard guard{mutex_};
  for (auto& [id, x] : gates_)
    x.serial = x.serial || xs.contains(id);
}

bool microbatch_sequencer::serial() const {
  std::lock_guard guard{mutex_};
  return serial_ || std::ranges::any_of(gates_, [](auto& x) {
           return x.second.serial;
         });
}

void microbatch_sequencer::distrust(const std::set<module_id>& xs) {
  std::lock_guard guard{mutex_};
  for (auto& [id, x] : gates_)
    if (xs.contains(id)) {
      x.sure = true;
      x.expected.reset();
    }
}

// -- microbatches -------------------------------------------------------------

bool microbatch_sequencer::passed(const gate& x, uint64_t start_number) const {
  return (over_[start_number] && x.late[start_number] == 0)
         || (x.expected && x.left[start_number] >= *x.expected
             && x.left[start_number] == x.entered[start_number]);
}

bool microbatch_sequencer::is_open(const std::vector<module_id>& xs,
                                   uint64_t start_number) const {
  for (auto id : xs) {
    auto i = gates_.find(id);
    if (i == gates_.end())
      continue;
    auto last = std::min<uint64_t>(start_number, i->second.left.size());
    for (uint64_t older = 0; older < last; ++older)
      if (!passed(i->second, older))
        return false;
  }
  return true;
}

/// @returns why the step must end, or an empty failure.
failure microbatch_sequencer::overtaken(const std::vector<module_id>& xs,
                                        uint64_t start_number,
                                        microbatch_id x) {
  if (start_number >= over_.size())
    return {};
  bool late = over_[start_number];
  for (auto id : xs) {
    auto i = gates_.find(id);
    if (i == gates_.end())
      continue;
    auto& y = i->second;
    if (late)
      called_late_.insert(id);
    if (start_number + 1 >= y.entered.size())
      continue;
    auto younger = y.entered.begin() + static_cast<ptrdiff_t>(start_number) + 1;
    if (std::none_of(younger, y.entered.end(), [](auto n) { return n > 0; }))
      continue;
    y.sure = y.sure || !late;
    if (y.sure)
      y.expected.reset();
    overtaken_.insert(id);
    return {error_code::unsupported, self_, name_ ? name_(id) : std::string{},
            "microbatch " + std::to_string(x.value)
              + (late ? " calls it after its first model.backward"
                      : " calls it more often than earlier steps did")
              + ", when a younger microbatch has been there: its state would "
                "see them in another order than in one process. Such a step is "
                "run again by default (smp.fast_mode = \"auto\"), and "
                "smp.active_microbatches = 1 lets none overtake another. "
                "Buffers are again what they were before the step, and from "
                "now on each microbatch "
              + (late ? "begins when the one before it ended"
                      : "waits there for the forward phase of the one before "
                        "it")
              + ", so that a program may set the gradients to zero and run the "
                "step once more"
              + (late ? "; for an overlap, make all calls of it before the "
                        "first model.backward"
                      : "")};
  }
  return {};
}

void microbatch_sequencer::enter(const std::vector<module_id>& xs,
                                 uint64_t start_number) {
  for (auto id : xs) {
    auto i = gates_.find(id);
    if (i == gates_.end() || start_number >= i->second.entered.size())
      continue;
    ++i->second.entered[start_number];
    if (over_[start_number])
      ++i->second.late[start_number];
  }
}

bool microbatch_sequencer::open(const std::vector<module_id>& xs,
                                uint64_t start_number, microbatch_id x) {
  std::lock_guard guard{mutex_};
  if (auto why = overtaken(xs, start_number, x))
    throw error{std::move(why)};
  if (!is_open(xs, start_number)) {
    asked_ = true;
    return false;
  }
  enter(xs, start_number);
  return true;
}

completion_ptr microbatch_sequencer::opening(const std::vector<module_id>& xs,
                                             uint64_t start_number,
                                             microbatch_id x) {
  std::lock_guard guard{mutex_};
  auto why = overtaken(xs, start_number, x);
  if (!why && is_open(xs, start_number)) {
    enter(xs, start_number);
    return nullptr;
  }
  auto result = std::make_shared<completion>();
  if (why)
    result->fail(std::move(why));
  else
    held_.push_back({xs, start_number, result});
  return result;
}

void microbatch_sequencer::leave(const std::vector<module_id>& xs,
                                 uint64_t start_number) {
  std::unique_lock guard{mutex_};
  for (auto id : xs) {
    auto i = gates_.find(id);
    if (i == gates_.end() || start_number >= i->second.left.size())
      continue;
    ++i->second.left[start_number];
    ++i->second.calls;
    // Calls nest: late calls end before the earlier ones that enclose them.
    if (auto& late = i->second.late[start_number]; late > 0)
      --late;
  }
  moved(std::move(guard));
}

void microbatch_sequencer::forward_over(uint64_t start_number, bool away) {
  std::unique_lock guard{mutex_};
  if (start_number >= over_.size())
    return;
  over_[start_number] = true;
  // A forward phase ends only after all its requests were answered (R39).
  for (auto& [id, x] : gates_)
    if (away && start_number < x.left.size()
        && x.entered[start_number] > x.left[start_number]) {
      x.late[start_number] = x.entered[start_number] - x.left[start_number];
      called_late_.insert(id);
    }
  moved(std::move(guard));
}

std::vector<completion_ptr> microbatch_sequencer::take_opened() {
  std::vector<completion_ptr> result;
  // Oldest first: a call that enters may keep the others waiting.
  std::stable_sort(held_.begin(), held_.end(), [](auto& x, auto& y) {
    return x.start_number < y.start_number;
  });
  std::erase_if(held_, [&](auto& x) {
    if (!is_open(x.modules, x.start_number))
      return false;
    enter(x.modules, x.start_number);
    result.push_back(std::move(x.opened));
    return true;
  });
  return result;
}

/// Wakes all that may enter now, without the lock, as they may call back.
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

std::set<module_id> microbatch_sequencer::overtaken_modules() const {
  std::lock_guard guard{mutex_};
  return overtaken_;
}

uint64_t microbatch_sequencer::calls(module_id x) const {
  std::lock_guard guard{mutex_};
  auto i = gates_.find(x);
  return i == gates_.end() ? 0 : i->second.calls;
}

} // namespace smp
