#include "actors/stalls/stall_judge.hpp"

#include "actors/stalls/branches.hpp"
#include "actors/stalls/wait_graph.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace smp {

namespace {

/// Number of looks in quick succession after the last progress. Later ones are
/// rare, as whatever begins or ends counts as progress.
constexpr uint64_t dense_looks = 8;

} // namespace

stall_judge::stall_judge(uint64_t world_size, stall_options options,
                         time_point now)
  : options_(options),
    ranks_(world_size, {0, now}),
    quiet_since_(now),
    next_report_(options.timeout) {
  // nop
}

bool stall_judge::heard(rank_id who, uint64_t progress, time_point now) {
  auto& x = ranks_.at(who.value);
  x.heard = now;
  if (std::exchange(x.progress, progress) == progress)
    return false;
  quiet_since_ = now;
  next_report_ = options_.timeout;
  settled_.clear();
  looks_ = next_look_ = asked_ = 0;
  return true;
}

bool stall_judge::wants_views(time_point now) {
  if (ended_ || now <= quiet_since_)
    return false;
  if (asked_++ >= next_look_ || due(now)) {
    next_look_ = ++looks_ < dense_looks ? asked_ : 2 * asked_;
    return true;
  }
  return false;
}

bool stall_judge::is_settled(const std::vector<rank_view>& views) const {
  uint64_t sent = 0;
  uint64_t taken = 0;
  for (auto& x : views) {
    if (!x.settled || !x.complete)
      return false;
    taken += x.refused;
    for (auto& y : x.peers) {
      sent += y.sent;
      taken += y.taken;
    }
  }
  return views.size() == ranks_.size() && sent == taken;
}

std::optional<stall_report> stall_judge::judge(std::vector<rank_view> views,
                                               time_point now) {
  auto left = [](auto& x) { return x.left; };
  if (ended_ || std::any_of(views.begin(), views.end(), left))
    return std::nullopt;
  std::sort(views.begin(), views.end(),
            [](auto& x, auto& y) { return x.rank < y.rank; });
  stall_report result;
  std::vector<uint64_t> now_settled;
  if (is_settled(views))
    for (auto& x : views)
      now_settled.push_back(x.progress);
  result.deadlock = !now_settled.empty() && now_settled == settled_;
  settled_ = std::move(now_settled);
  if (result.deadlock) {
    if (settled_ == failed_)
      return std::nullopt; // they were told, and are about to continue
    result.step_fails = different_branches(views);
    for (auto& x : views)
      result.steps.push_back(x.step);
  }
  auto is_due = due(now);
  if (!result.deadlock && !is_due)
    return std::nullopt;
  std::map<rank_id, double> silent;
  for (uint64_t i = 0; i < ranks_.size(); ++i) {
    auto is_rank = [i](auto& x) { return x.rank.value == i; };
    if (std::any_of(views.begin(), views.end(), is_rank))
      continue;
    auto since = seconds(ranks_[i].heard, now);
    if (since < std::min(options_.timeout / 2, 5.0))
      return std::nullopt; // it is only slow: look again
    silent.emplace(rank_id{i}, since);
    result.silent.push_back(rank_id{i});
  }
  wait_graph graph{std::move(views), silent};
  if (is_due)
    while (due(now))
      next_report_ *= 2;
  // If nothing waits, the ranks only compute.
  if (!graph.waiting() && silent.empty())
    return std::nullopt;
  auto chain = graph.worst();
  if (result.step_fails)
    failed_ = settled_;
  else
    result.ends = ended_ = result.deadlock || options_.end;
  result.culprit = chain.culprit;
  if (chain.nodes.empty() && !silent.empty())
    result.culprit = silent.begin()->first;
  result.all = graph.lines();
  result.text = result.deadlock
                  ? "the run is stalled, as nothing executes and nothing is in "
                    "flight: "
                  : fmt::format("nothing moved for {:.1f} s: ",
                                seconds(quiet_since_, now));
  result.text += result.step_fails ? result.step_fails.describe()
                                   : graph.text(chain);
  return result;
}

} // namespace smp
