#include "runtime/launch/restart_policy.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <set>
#include <utility>

namespace smp {

namespace {

constexpr uint64_t most_at_one_place = 3;
constexpr std::chrono::seconds first_wait{1};
constexpr std::chrono::seconds longest_wait{60};

} // namespace

bool restart_policy::is_loss(const attempt_end& x) const {
  switch (x.code) {
    case 2:   // a configuration, data or a limit of the system
    case 5:   // numbers: the next attempt computes the same
    case 130: // a rank was interrupted, by itself
      return false;
    case 4:
      return !x.deadlock;
    default:
      break;
  }
  // A program that fails before it has ever made a step is wrong.
  const bool by_itself = x.code != 0 || x.early;
  return !by_itself || x.made_steps || restarts_ > 0;
}

restart_decision restart_policy::decide(const attempt_end& x) {
  if (limit_ == 0 || !x.cause || x.interrupted || !is_loss(x))
    return {};
  if (failures_.empty() || x.steps > furthest_) {
    failures_.clear();
    furthest_ = x.steps;
    wait_ = {};
  }
  auto& [count, first] = failures_[x.steps];
  if (++count == 1)
    first = x.cause;
  if (count == most_at_one_place)
    return {.why_not = fmt::format(
              "not started again: {} times after {} steps, and none got "
              "further; the first time {}",
              count, x.steps, first.describe())};
  if (restarts_ == limit_)
    return {
      .why_not = fmt::format("not started again: {} of {} restarts are made",
                             restarts_, limit_)};
  ++restarts_;
  wait_ = std::clamp(2 * wait_, first_wait, longest_wait);
  return {.again = true, .wait = wait_};
}

std::vector<uint64_t> shares_among(const std::vector<uint64_t>& all,
                                   const std::vector<uint64_t>& here,
                                   const rank_limit& fit) {
  std::vector<uint64_t> result(all.size(), 0);
  uint64_t present = 0;
  for (auto x : std::set(here.begin(), here.end()))
    present += result.at(x) = all.at(x);
  if (!fit || result == all)
    return all;
  auto left = fit(present);
  if (left == 0)
    return all;
  for (auto& x : result) {
    x = std::min(x, left);
    left -= x;
  }
  return result;
}

uint64_t ranks_in(const std::vector<uint64_t>& shares) {
  return std::accumulate(shares.begin(), shares.end(), uint64_t{0});
}

late_machines::late_machines(std::vector<uint64_t> all,
                             std::vector<uint64_t> now, rank_limit fit)
  : all_(std::move(all)), now_(std::move(now)), fit_(std::move(fit)) {
  for (uint64_t i = 0; i < now_.size(); ++i)
    if (now_[i] > 0)
      here_.push_back(i);
}

bool late_machines::note(uint64_t machine) {
  if (machine >= now_.size() || now_[machine] > 0 || returned_ >= 0)
    return false;
  here_.push_back(machine);
  if (ranks_in(shares_among(all_, here_, fit_)) <= ranks_in(now_))
    return false;
  returned_ = static_cast<int64_t>(machine);
  return true;
}

std::optional<uint64_t> late_machines::get() const {
  auto x = returned_.load();
  return x < 0 ? std::nullopt : std::optional{static_cast<uint64_t>(x)};
}

} // namespace smp
