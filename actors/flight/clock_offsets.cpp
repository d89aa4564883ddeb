#include "actors/flight/clock_offsets.hpp"

#include <algorithm>
#include <deque>
#include <limits>
#include <map>
#include <string>
#include <utility>

namespace smp {

namespace {

constexpr int64_t unknown = std::numeric_limits<int64_t>::max();

/// From a pair of clocks to the shortest time that a message seemed to take.
using delays = std::map<std::pair<std::string, std::string>, int64_t>;

void look_at(const flight_log& from, std::span<const flight_moment> sent,
             const flight_log& to, std::span<const flight_moment> taken,
             delays& result) {
  std::map<request_id, int64_t> times;
  for (auto& x : sent)
    if (x.peer == to.rank)
      times.emplace(x.request, x.time);
  auto& shortest = result.try_emplace({from.clock, to.clock}, unknown)
                     .first->second;
  for (auto& x : taken)
    if (auto i = times.find(x.request); i != times.end())
      shortest = std::min(shortest, x.time - i->second);
}

int64_t delay(const delays& all, const std::string& from,
              const std::string& to) {
  auto i = all.find({from, to});
  return i == all.end() ? unknown : i->second;
}

} // namespace

std::vector<clock_offset>
clock_offsets(std::span<const flight_log> logs,
              std::span<const flight_timeline> timelines) {
  if (logs.empty())
    return {};
  delays all;
  for (size_t i = 0; i < logs.size(); ++i)
    for (size_t k = 0; k < logs.size(); ++k)
      if (logs[i].clock != logs[k].clock) {
        look_at(logs[i], timelines[i].asked, logs[k], timelines[k].arrived,
                all);
        look_at(logs[i], timelines[i].answered, logs[k], timelines[k].replies,
                all);
      }
  std::map<std::string, clock_offset> known{{logs[0].clock, {}}};
  std::deque<std::string> next{logs[0].clock};
  while (!next.empty()) {
    auto at = next.front();
    next.pop_front();
    for (auto& x : logs) {
      auto there = delay(all, at, x.clock);
      auto back = delay(all, x.clock, at);
      if (known.contains(x.clock) || there == unknown || back == unknown)
        continue;
      auto& base = known[at];
      known[x.clock] = {
        base.offset - (there - back) / 2,
        base.uncertainty + std::max<int64_t>((there + back) / 2, 1), false};
      next.push_back(x.clock);
    }
  }
  std::vector<clock_offset> result;
  for (auto& x : logs)
    if (auto i = known.find(x.clock); i != known.end())
      result.push_back(i->second);
    else
      result.push_back({x.epoch - logs[0].epoch, 0, true});
  return result;
}

} // namespace smp
