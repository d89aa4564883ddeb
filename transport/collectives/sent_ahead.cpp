#include "transport/collectives/sent_ahead.hpp"

#include <algorithm>

namespace smp {

bool sent_ahead::add(rank_id to, uint64_t bytes) {
  auto& kept = kept_by_[to];
  auto sum = kept;
  sum += {1, bytes};
  if (sum.exceeds(limit_))
    return false;
  kept = sum;
  return true;
}

void sent_ahead::leave(const collective_label& x, rank_id to,
                       const message_amount& y) {
  if (x.step.value > 0 && x.step <= last_over_)
    remove(to, y);
  else
    left_[x].emplace(to, y);
}

void sent_ahead::joined(const collective_label& x, rank_id from) {
  if (left_.empty())
    return;
  auto call = left_.find(x);
  if (call == left_.end())
    return;
  if (auto i = call->second.find(from); i != call->second.end()) {
    remove(from, i->second);
    call->second.erase(i);
  }
  if (call->second.empty())
    left_.erase(call);
}

void sent_ahead::step_over(step_id x) {
  last_over_ = std::max(last_over_, x);
  std::erase_if(left_, [this](auto& call) {
    auto& step = call.first.step;
    if (step.value == 0 || step > last_over_)
      return false;
    for (auto& [to, y] : call.second)
      remove(to, y);
    return true;
  });
}

} // namespace smp
