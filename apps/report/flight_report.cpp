#include "apps/report/flight_report.hpp"

#include "actors/flight/clock_offsets.hpp"
#include "apps/report/text_layout.hpp"

#include <fmt/chrono.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <string>
#include <vector>

namespace smp::app {

namespace {

const char* to_string(flight_kind x) {
  using enum flight_kind;
  switch (x) {
    case none:
      break;
    case step_begins:
      return "step begins";
    case step_ends:
      return "step ends";
    case admitted:
      return "admitted";
    case asked:
      return "asks";
    case arrived:
      return "request came";
    case executes:
      return "executes";
    case parked:
      return "waits";
    case resumed:
      return "goes on";
    case ended:
      return "ended";
    case answered:
      return "answers";
    case reply:
      return "answer came";
    case transfer_begins:
      return "transfer begins";
    case transfer_ends:
      return "transfer ends";
    case tensors_arrived:
      return "tensors came";
    case collective_begins:
      return "collective begins";
    case collective_ends:
      return "collective ends";
    case activity_begins:
      return "begins";
    case activity_ends:
      return "ends";
    case module_begins:
      return "calls";
    case module_ends:
      return "returns";
    case memory:
      return "memory";
    case failed:
      return "step failed";
  }
  return "";
}

const char* to_string(phase x) {
  return x == phase::forward ? "forward" : "backward";
}

/// Which of an event's fields mean something.
bool has_microbatch(flight_kind x) {
  using enum flight_kind;
  return x == admitted || x == asked || x == arrived || x == executes
         || x == parked || x == resumed || x == ended || x == module_begins
         || x == module_ends;
}

bool has_request(flight_kind x) {
  using enum flight_kind;
  return x == asked || x == arrived || x == answered || x == reply
         || x == executes || x == ended;
}

bool has_name(flight_kind x) {
  using enum flight_kind;
  return (has_microbatch(x) && x != admitted) || x == activity_begins
         || x == activity_ends || x == collective_begins
         || x == collective_ends;
}

bool has_step(flight_kind x) {
  using enum flight_kind;
  return x == step_begins || x == step_ends || x == failed || x == admitted;
}

std::string text_of(const flight_event& x, const flight_log& log) {
  std::vector<std::string> parts;
  if (has_step(x.kind))
    parts.push_back(fmt::format("step {}", x.step));
  if (has_name(x.kind))
    parts.push_back(name_of(x.name, log));
  if (has_microbatch(x.kind)) {
    parts.push_back(fmt::format("microbatch {}", x.microbatch));
    parts.emplace_back(to_string(x.what));
  }
  if (x.peer != flight_event::no_peer)
    parts.push_back(fmt::format("rank {}", x.peer));
  if (x.amount > 0)
    parts.push_back(bytes_text(x.amount));
  if (has_request(x.kind))
    parts.push_back(fmt::format("request {}:{}", x.origin, x.number));
  if (x.context > 0)
    parts.push_back(fmt::format("context {}", x.context));
  return fmt::format("{}", fmt::join(parts, ", "));
}

/// @returns the time of the day
std::string clock_text(int64_t nanoseconds) {
  std::chrono::sys_time<std::chrono::microseconds> time{
    std::chrono::duration_cast<std::chrono::microseconds>(
      std::chrono::nanoseconds{nanoseconds})};
  auto seconds = std::chrono::system_clock::to_time_t(
    std::chrono::floor<std::chrono::seconds>(time));
  std::tm local{};
  ::localtime_r(&seconds, &local);
  return fmt::format("{:%H:%M:%S}.{:06}", local,
                     time.time_since_epoch().count() % 1'000'000);
}

struct found_event {
  const flight_log* log;
  const flight_event* event;
  int64_t time; // since the epoch
};

struct open_slice {
  std::string text;
  double seconds;
};

struct rank_end {
  const flight_log* log;
  std::vector<open_slice> middle_of;
};

/// What both forms show.
class flight_report {
public:
  flight_report(std::span<const flight_log> logs, const flight_selection& x) {
    std::vector<flight_timeline> lines;
    for (auto& log : logs)
      lines.push_back(timeline_of(log));
    auto offsets = clock_offsets(logs, lines);
    for (size_t i = 0; i < logs.size(); ++i) {
      auto& log = logs[i];
      if (x.rank && log.rank.value != *x.rank)
        continue;
      ends.push_back({&log, middle_of(log, lines[i])});
      for (auto& y : log.events)
        events.push_back(
          {&log, &y, y.time + offsets[i].offset + logs.front().epoch});
    }
    std::ranges::stable_sort(events, {}, &found_event::time);
    if (events.size() > x.last)
      events.erase(events.begin(),
                   events.end() - static_cast<std::ptrdiff_t>(x.last));
  }

  std::vector<rank_end> ends;
  std::vector<found_event> events;

private:
  static std::vector<open_slice> middle_of(const flight_log& log,
                                           const flight_timeline& line) {
    std::vector<open_slice> result;
    for (auto& x : line.slices)
      if (x.open && x.what != flight_slice::kind::execution) {
        auto title = title_of(x, log);
        if (x.what == flight_slice::kind::waiting)
          title = fmt::format("microbatch {} {}", x.microbatch, title);
        else if (x.what == flight_slice::kind::transfer)
          title = "transfer " + title;
        result.push_back(
          {std::move(title), static_cast<double>(x.end - x.begin) * 1e-9});
      }
    return result;
  }
};

} // namespace

std::string flight_text(std::span<const flight_log> logs,
                        const flight_selection& x) {
  flight_report report{logs, x};
  std::string result;
  for (auto& end : report.ends) {
    result += fmt::format("rank {}:", end.log->rank.value);
    if (end.middle_of.empty())
      result += end.log->events.empty() ? " no events" : " between steps";
    for (auto& y : end.middle_of)
      result += fmt::format("{} {} ({} until its last event)",
                            &y == &end.middle_of.front() ? "" : ";", y.text,
                            duration_text(y.seconds));
    result += '\n';
  }
  result += '\n';
  for (auto& y : report.events)
    result += fmt::format("{}  r{:<4} {:<18} {}\n", clock_text(y.time),
                          y.log->rank.value, to_string(y.event->kind),
                          text_of(*y.event, *y.log));
  return printable(result);
}

json flight_json(std::span<const flight_log> logs, const flight_selection& x) {
  flight_report report{logs, x};
  json ranks = json::array();
  for (auto& end : report.ends) {
    json open = json::array();
    for (auto& y : end.middle_of)
      open.push_back({{"what", printable(y.text)}, {"seconds", y.seconds}});
    ranks.push_back({{"rank", end.log->rank.value},
                     {"pid", end.log->pid},
                     {"host", printable(end.log->host)},
                     {"events", end.log->events.size()},
                     {"in_the_middle_of", std::move(open)}});
  }
  json events = json::array();
  for (auto& y : report.events) {
    auto& event = *y.event;
    json z{{"time", static_cast<double>(y.time) * 1e-9},
           {"rank", y.log->rank.value},
           {"kind", to_string(event.kind)},
           {"step", event.step}};
    if (has_name(event.kind))
      z["name"] = printable(name_of(event.name, *y.log));
    if (has_microbatch(event.kind)) {
      z["microbatch"] = event.microbatch;
      z["phase"] = to_string(event.what);
    }
    if (event.peer != flight_event::no_peer)
      z["peer"] = event.peer;
    if (event.amount > 0)
      z["bytes"] = event.amount;
    if (has_request(event.kind))
      z["request"] = fmt::format("{}:{}", event.origin, event.number);
    events.push_back(std::move(z));
  }
  return {{"ranks", std::move(ranks)}, {"events", std::move(events)}};
}

} // namespace smp::app
