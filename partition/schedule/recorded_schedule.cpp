#include "partition/schedule/recorded_schedule.hpp"

#include <algorithm>
#include <utility>

namespace smp {

namespace {

/// A microbatch without a backward phase counts to the end.
uint64_t most_alive(const std::vector<task>& tasks) {
  uint64_t alive = 0, result = 1;
  for (auto& x : tasks)
    if (x.what == phase::backward)
      --alive;
    else
      result = std::max(result, ++alive);
  return result;
}

} // namespace

recorded_schedule::recorded_schedule(uint64_t microbatches,
                                     std::vector<task> tasks)
  : book_(microbatches),
    tasks_(std::move(tasks)),
    active_(most_alive(tasks_)),
    started_(microbatches, false) {
  // nop
}

std::optional<task> recorded_schedule::next() {
  if (!diverged_)
    return next_recorded();
  if (book_.can_turn())
    return book_.turn();
  auto i = std::find(started_.begin(), started_.end(), false);
  if (i == started_.end() || book_.alive() >= active_)
    return std::nullopt;
  *i = true;
  return book_.start(
    microbatch_id{static_cast<uint64_t>(i - started_.begin())});
}

std::optional<task> recorded_schedule::next_recorded() {
  for (; at_ < tasks_.size(); ++at_) {
    auto x = tasks_[at_];
    if (x.what == phase::forward) {
      ++at_;
      started_.at(x.microbatch.value) = true;
      return book_.start(x.microbatch);
    }
    if (book_.can_turn(x.microbatch)) {
      ++at_;
      return book_.turn(x.microbatch);
    }
    if (!book_.has_ended(x.microbatch))
      return std::nullopt;
  }
  return std::nullopt;
}

void recorded_schedule::forward_done(microbatch_id x) {
  book_.forward_done(x);
}

void recorded_schedule::ended(microbatch_id x) {
  book_.ended(x);
}

void recorded_schedule::diverge() {
  diverged_ = true;
}

} // namespace smp
