#include "actors/cluster/roster.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <sstream>
#include <string_view>
#include <utility>

namespace smp {

namespace {

std::string describe(const member& x) {
  return fmt::format("rank {} (pid {} on host {})", x.rank.value, x.pid,
                     x.host);
}

std::map<std::string, std::string> by_key(const std::string& settings) {
  std::map<std::string, std::string> result;
  std::istringstream lines{settings};
  for (std::string line; std::getline(lines, line);) {
    const std::string_view equals = " = ";
    auto at = std::min(line.find(equals), line.size());
    auto value = line.substr(std::min(at + equals.size(), line.size()));
    result.emplace(line.substr(0, at), value);
  }
  return result;
}

/// @returns "KEY = A against B" for the first settings that differ.
std::string differences(const std::string& mine, const std::string& other) {
  constexpr size_t shown = 3;
  auto xs = by_key(mine);
  auto ys = by_key(other);
  std::map<std::string, std::pair<std::string, std::string>> both;
  for (auto& [key, value] : xs)
    both[key] = {value, "none"};
  for (auto& [key, value] : ys)
    both.try_emplace(key, "none", "").first->second.second = value;
  std::string result;
  size_t count = 0;
  for (auto& [key, values] : both)
    if (values.first != values.second && count++ < shown)
      result += fmt::format("{}{} = {} against {}", result.empty() ? "" : ", ",
                            key, values.first, values.second);
  if (count > shown)
    result += fmt::format(", and {} more", count - shown);
  return result;
}

/// @returns "rank 1", "ranks 1, 2"
std::string names_of(const std::vector<rank_id>& xs) {
  std::string result = xs.size() > 1 ? "ranks" : "rank";
  for (auto x : xs)
    result += fmt::format("{}{}", x == xs.front() ? " " : ", ", x.value);
  return result;
}

/// The text names the rank, or both ranks, so the failure has none.
failure refuse(std::string text) {
  return {error_code::config, no_rank, {}, std::move(text)};
}

} // namespace

roster::roster(uint64_t world_size, std::string run_id)
  : world_size_(world_size), run_id_(std::move(run_id)) {
  // nop
}

// -- joining ------------------------------------------------------------------

failure roster::check_stranger(const member& x) const {
  if (x.run_id != run_id_)
    return refuse(describe(x) + " belongs to another run");
  return {};
}

failure roster::admit(const member& x) {
  if (x.rank.value >= world_size_)
    return refuse(fmt::format("{} is out of range: the run has {} ranks",
                              describe(x), world_size_));
  if (auto i = members_.find(x.rank); i != members_.end())
    return refuse(fmt::format("{} claims the place of {}", describe(x),
                              describe(i->second)));
  if (!members_.empty()) {
    auto& first = members_.begin()->second;
    if (x.build != first.build)
      return refuse(fmt::format("{} runs another build than {}: {} vs {}",
                                describe(x), describe(first), x.build,
                                first.build));
    if (x.settings != first.settings)
      return refuse(fmt::format("{} has another configuration than {}: {}",
                                describe(x), describe(first),
                                differences(x.settings, first.settings)));
  }
  members_.emplace(x.rank, x);
  return {};
}

std::vector<member> roster::members() const {
  std::vector<member> result;
  for (auto& [rank, x] : members_) {
    result.push_back(x);
    result.back().run_id.clear(); // they know it, or must not
    result.back().settings.clear();
  }
  return result;
}

std::vector<rank_id> roster::absent() const {
  std::vector<rank_id> result;
  for (uint64_t i = 0; i < world_size_; ++i)
    if (members_.count(rank_id{i}) == 0)
      result.push_back(rank_id{i});
  return result;
}

failure roster::missing(std::chrono::milliseconds limit) const {
  return {error_code::rank_down,
          no_rank,
          {},
          fmt::format("{} did not join within {} s", names_of(absent()),
                      static_cast<double>(limit.count()) / 1000)};
}

std::string roster::describe_absence(const std::vector<rank_id>& x,
                                     std::chrono::duration<double> since) {
  auto several = x.size() > 1;
  return fmt::format(
    "{} {} not joined, and nobody has for {:.1f} s: {} not begun yet, {} "
    "stopped, or {} not reach the SUPERVISOR",
    names_of(x), several ? "have" : "has", since.count(),
    several ? "their processes have" : "its process has",
    several ? "are" : "is", several ? "do" : "does");
}

// -- leaving ------------------------------------------------------------------

void roster::leave(rank_id x) {
  gone_.insert(x);
}

bool roster::lose(const failure& x) {
  if (!expected(x.rank))
    return false;
  losses_.push_back(x);
  return true;
}

failure roster::loss_of(rank_id x, const std::set<rank_id>& connected) const {
  failure result{error_code::rank_down, x, {}, ""};
  auto& lost = members_.at(x);
  bool elsewhere = false;
  bool left = false;
  std::string ranks;
  for (auto& [rank, y] : members_) {
    if (y.machine != lost.machine) {
      elsewhere = true;
      continue;
    }
    left |= connected.contains(rank);
    ranks += (ranks.empty() ? "" : ", ") + std::to_string(rank.value);
  }
  if (elsewhere)
    result.machine = lost.host;
  if (elsewhere && !left)
    result.text = fmt::format(
      "lost with machine {} (rank{} {}): it is off or out of reach, or its "
      "processes ended",
      lost.host, ranks.find(',') != std::string::npos ? "s" : "", ranks);
  else
    result.text = fmt::format(
      "lost: its process ended or its connection broke{}",
      elsewhere ? " (on machine " + lost.host + ')' : "");
  return result;
}

bool roster::expected(rank_id x) const {
  auto is_x = [x](auto& y) { return y.rank == x; };
  return x.value < world_size_ && gone_.count(x) == 0
         && std::none_of(losses_.begin(), losses_.end(), is_x);
}

std::string roster::describe_stop(rank_id x,
                                  std::chrono::duration<double> since) const {
  return fmt::format("rank {} has been stopped by a signal for {:.1f} s, {}",
                     x.value, since.count(),
                     !complete()     ? "before all ranks joined"
                     : gone_.empty() ? "while the run begins"
                                     : "and others have left the run");
}

// -- properties ---------------------------------------------------------------

std::vector<rank_id> roster::present() const {
  std::vector<rank_id> result;
  for (auto& [rank, x] : members_)
    if (expected(rank))
      result.push_back(rank);
  return result;
}

std::vector<rank_id> roster::gone() const {
  return {gone_.begin(), gone_.end()};
}

} // namespace smp
