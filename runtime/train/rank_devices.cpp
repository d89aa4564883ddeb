#include "runtime/train/rank_devices.hpp"

#include "partition/rank_layout.hpp"
#include "runtime/device/rank_device.hpp"
#include "runtime/session/groups.hpp"
#include "runtime/session/rank_runtime.hpp"
#include "runtime/session/session.hpp"
#include "transport/process_state.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <utility>

namespace smp {

namespace {

/// @returns "0, 1", "0-3", "0, 0, 1, 1"
std::string list_text(const std::vector<std::string>& xs) {
  std::string result;
  for (size_t i = 0; i < xs.size();) {
    auto end = i + 1;
    while (end < xs.size()
           && std::stoull(xs[end]) == std::stoull(xs[i]) + end - i)
      ++end;
    // Of two neighbours a range would look like a difference.
    if (end - i < 3)
      end = i + 1;
    result += (result.empty() ? "" : ", ") + xs[i];
    if (end > i + 1)
      result += "-" + xs[end - 1];
    i = end;
  }
  return result;
}

std::string kind_of(const rank_place& x) {
  return x.device.substr(0, x.device.find(':'));
}

std::string memory_text(const std::vector<rank_place>& xs) {
  auto gb = [](const rank_place& x) {
    return fmt::format("{:.1f}", 1e-9 * static_cast<double>(x.memory));
  };
  auto [least, most] = std::ranges::minmax_element(xs, {}, &rank_place::memory);
  return gb(*least) == gb(*most)
           ? fmt::format("{} GB{}", gb(*most), xs.size() > 1 ? " each" : "")
           : fmt::format("{} to {} GB", gb(*least), gb(*most));
}

} // namespace

std::vector<rank_place> places_of_ranks(session& s) {
  auto& rank = s.internals();
  rank_place mine;
  mine.machine = rank.layout().machine_of_ranks().at(rank.self().value);
  mine.host = host_name();
  mine.pp_rank = rank.pp_rank();
  mine.device = rank.device().str();
  if (auto* launches = rank.launches())
    mine.memory = launches->last_memory().total;
  return allgather(mine);
}

std::vector<std::string> devices_text(const std::vector<rank_place>& by_rank) {
  struct part {
    std::vector<rank_place> places;
    std::vector<std::string> ranks, indices, stages;
  };
  std::map<std::pair<uint64_t, std::string>, part> parts;
  bool several_machines = false, other_stages = false;
  for (size_t rank = 0; rank < by_rank.size(); ++rank) {
    auto& x = by_rank[rank];
    several_machines |= x.machine > 0;
    other_stages |= x.pp_rank != rank;
    if (x.memory == 0)
      continue;
    auto kind = kind_of(x);
    auto& to = parts[{x.machine, kind}];
    to.places.push_back(x);
    to.ranks.push_back(std::to_string(rank));
    to.indices.push_back(x.device.substr(kind.size() + 1));
    to.stages.push_back(std::to_string(x.pp_rank));
  }
  std::vector<std::string> result;
  for (auto& [key, x] : parts) {
    std::string of;
    if (by_rank.size() > 1)
      of = (x.ranks.size() > 1 ? "ranks " : "rank ") + list_text(x.ranks);
    if (several_machines)
      of += " on " + x.places.front().host;
    auto& line = result.emplace_back(
      fmt::format("{}{}{}:{} ({})", of, of.empty() ? "" : ": ", key.second,
                  list_text(x.indices), memory_text(x.places)));
    if (other_stages)
      line += fmt::format(", device{} {} of the partition",
                          x.stages.size() > 1 ? "s" : "", list_text(x.stages));
  }
  return result;
}

device_memory_sum::device_memory_sum(const session& s,
                                     std::vector<rank_place> by_rank)
  : session_(&s) {
  if (std::ranges::any_of(by_rank, [](auto& x) { return x.memory > 0; }))
    by_rank_ = std::move(by_rank);
}

void device_memory_sum::add_to(std::vector<double>& summands) const {
  auto end = summands.size();
  summands.resize(end + 2 * by_rank_.size());
  if (by_rank_.empty())
    return;
  if (auto* launches = session_->internals().launches()) {
    auto held = launches->look_at_memory();
    auto own = end + 2 * session_->rank();
    summands[own] = static_cast<double>(held.now);
    summands[own + 1] = static_cast<double>(held.peak);
  }
}

std::vector<device_status>
device_memory_sum::read(const std::vector<double>& sums) const {
  std::vector<device_status> result;
  auto at = sums.end() - static_cast<ptrdiff_t>(2 * by_rank_.size());
  for (auto& x : by_rank_) {
    auto now = static_cast<uint64_t>(*at++);
    result.push_back({x.device, now, static_cast<uint64_t>(*at++), x.memory});
  }
  return result;
}

} // namespace smp
