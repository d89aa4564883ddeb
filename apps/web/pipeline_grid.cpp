#include "apps/web/pipeline_grid.hpp"

#include "actors/flight/clock_offsets.hpp"
#include "apps/report/text_layout.hpp"

#include <algorithm>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace smp::app {

namespace {

using slice_kind = flight_slice::kind;

/// By their place in this list, which is also the order in which they are
/// drawn.
constexpr const char* grid_kinds[] = {"wait",    "other",    "optimizer",
                                      "forward", "backward", "communication"};

/// @returns nothing if it is not shown
std::optional<size_t> kind_of(const flight_slice& x, const flight_log& from) {
  switch (x.what) {
    case slice_kind::waiting:
      return 0;
    case slice_kind::activity: {
      auto& name = from.name(x.name);
      return name == "optimizer" ? 2 : name == "checkpoint" ? 1 : 0;
    }
    case slice_kind::executing:
      return x.in == phase::forward ? 3 : 4;
    case slice_kind::transfer:
    case slice_kind::collective:
      return 5;
    default:
      return std::nullopt;
  }
}

struct shown_slice {
  int64_t begin; // ns of the common clock
  int64_t end;
  size_t kind;
  size_t name;
};

/// Gives texts numbers, as most are used many times.
class name_table {
public:
  size_t number_of(const std::string& x) {
    auto [i, is_new] = numbers_.emplace(x, numbers_.size());
    if (is_new)
      texts_.push_back(printable(x));
    return i->second;
  }

  json take() {
    return std::move(texts_);
  }

private:
  std::map<std::string, size_t> numbers_;
  json texts_ = json::array();
};

class grid {
public:
  grid(std::span<const flight_log> logs, double quiet_seconds,
       const grid_limits& limits)
    : logs_(logs), limits_(limits) {
    for (auto& x : logs)
      timelines_.push_back(timeline_of(x));
    offsets_ = clock_offsets(logs, timelines_);
    std::optional<int64_t> first, last; // of the last events of ranks
    for (size_t i = 0; i < logs.size(); ++i)
      if (auto& events = logs[i].events; !events.empty()) {
        auto time = events.back().time + offsets_[i].offset;
        first = std::min(first.value_or(time), time);
        last = std::max(last.value_or(time), time);
      }
    if (!last)
      return;
    now_ = *last + static_cast<int64_t>(quiet_seconds * 1e9);
    length_ = length();
    // Ranks do not answer at the same moment. One that did nothing for longer
    // has its last slice until now.
    if (auto apart = *last - *first; apart < 1'000'000'000)
      length_ += apart;
  }

  json result() {
    auto ranks = json::array();
    for (size_t i = 0; i < logs_.size(); ++i)
      ranks.push_back(
        {{"rank", logs_[i].rank.value}, {"slices", slices_of(i)}});
    return {{"seconds", static_cast<double>(length_) * 1e-9},
            {"kinds", grid_kinds},
            {"ranks", std::move(ranks)},
            {"steps", steps()},
            {"names", names_.take()}};
  }

private:
  /// Some steps of the rank whose steps took longest.
  int64_t length() const {
    auto seconds = limits_.least;
    for (auto& line : timelines_) {
      std::vector<int64_t> begins;
      for (auto& x : line.slices)
        if (x.what == slice_kind::step)
          begins.push_back(x.begin);
      std::ranges::sort(begins);
      if (begins.size() < 2)
        continue;
      auto n = std::min<size_t>(begins.size() - 1, limits_.steps);
      auto time = begins.back() - begins[begins.size() - 1 - n];
      seconds = std::max(seconds, static_cast<double>(time) * 1e-9
                                    / static_cast<double>(n)
                                    * static_cast<double>(limits_.steps));
    }
    return static_cast<int64_t>(std::min(seconds, limits_.most) * 1e9);
  }

  /// Microseconds from the left.
  int64_t place(int64_t time) const {
    return (time - (now_ - length_)) / 1000;
  }

  std::vector<shown_slice> shown(size_t i) {
    std::vector<shown_slice> result;
    for (auto& x : timelines_[i].slices) {
      auto kind = kind_of(x, logs_[i]);
      auto begin = x.begin + offsets_[i].offset;
      auto end = x.open ? now_ : x.end + offsets_[i].offset;
      if (!kind || end < now_ - length_ || begin > now_)
        continue;
      result.push_back({std::max(begin, now_ - length_), std::min(end, now_),
                        *kind, names_.number_of(title_of(x, logs_[i]))});
    }
    std::ranges::sort(result, {}, &shown_slice::begin);
    return merged(std::move(result));
  }

  /// Joins slices of a kind between which nobody sees a gap; if that is not
  /// enough, the oldest ones go.
  std::vector<shown_slice> merged(std::vector<shown_slice> xs) const {
    const auto most = std::max<size_t>(limits_.slices / logs_.size(), 20);
    if (xs.size() <= most)
      return xs;
    const auto gap = length_ / 1000;
    std::vector<shown_slice> result;
    std::map<size_t, size_t> last; // by kind
    for (auto& x : xs) {
      auto i = last.find(x.kind);
      if (i != last.end() && x.begin - result[i->second].end < gap
          && x.end - x.begin < gap) {
        result[i->second].end = std::max(result[i->second].end, x.end);
        continue;
      }
      last[x.kind] = result.size();
      result.push_back(x);
    }
    if (result.size() > most)
      result.erase(result.begin(),
                   result.end() - static_cast<std::ptrdiff_t>(most));
    return result;
  }

  json slices_of(size_t i) {
    auto result = json::array();
    for (auto& x : shown(i))
      result.push_back({place(x.begin), place(x.end), x.kind, x.name});
    return result;
  }

  /// Of the first rank: all begin them at about the same time.
  json steps() const {
    auto result = json::array();
    if (timelines_.empty())
      return result;
    for (auto& x : timelines_.front().slices)
      if (x.what == slice_kind::step && place(x.begin) >= 0)
        result.push_back({place(x.begin), x.step});
    return result;
  }

  std::span<const flight_log> logs_;
  const grid_limits& limits_;
  std::vector<flight_timeline> timelines_;
  std::vector<clock_offset> offsets_;
  int64_t now_ = 0;
  int64_t length_ = 0;
  name_table names_;
};

} // namespace

json grid_json(std::span<const flight_log> logs, double quiet_seconds,
               const grid_limits& limits) {
  if (logs.empty())
    return {};
  return grid{logs, quiet_seconds, limits}.result();
}

} // namespace smp::app
