#include "actors/flight/trace_file.hpp"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <iterator>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <string_view>

namespace smp {

namespace {

using kind = flight_slice::kind;

/// Tracks of a rank, in the order in which they are shown. Perfetto takes a
/// track with the number of its process for the first one, so they are no
/// numbers of ranks.
constexpr uint64_t user = 1'000'001;
constexpr uint64_t executes = 1'000'002;
constexpr uint64_t planned = 1'000'003;
constexpr uint64_t replies = 1'000'004;
constexpr uint64_t contexts = 1'000'010;

std::string json_text(const std::string& x) {
  return nlohmann::json(x).dump(-1, ' ', false,
                                nlohmann::json::error_handler_t::replace);
}

std::string text_of(request_id x) {
  return fmt::format("{}:{}", x.origin.value, x.number);
}

/// Writes the events of all ranks.
class trace_writer {
public:
  trace_writer(std::ostream& out, std::span<const flight_log> logs)
    : out_(out), logs_(logs) {
    for (auto& x : logs)
      timelines_.push_back(timeline_of(x));
    offsets_ = clock_offsets(logs, timelines_);
    zero_ = std::numeric_limits<int64_t>::max();
    for (size_t i = 0; i < logs.size(); ++i)
      if (!logs[i].events.empty())
        zero_ = std::min(zero_, at(i, logs[i].events.front().time));
  }

  void write(std::span<const planned_slice> plan);

private:
  /// @returns a time of log `i` by the common clock
  int64_t at(size_t i, int64_t time) const {
    return time + offsets_[i].offset;
  }

  /// @param fields what only events of this kind have, as members of an object
  void put(char what, size_t i, uint64_t track, std::string_view fields) {
    fmt::format_to(
      std::back_inserter(text_), R"({}{{"ph":"{}","pid":{},"tid":{},{}}})",
      first_ ? "\n" : ",\n", what, logs_[i].rank.value, track, fields);
    first_ = false;
    if (text_.size() > size_t{1} << 20)
      flush();
  }

  void flush() {
    out_ << text_;
    text_.clear();
  }

  /// @returns the field of a time: microseconds since the first event
  std::string when(size_t i, int64_t time) const {
    return fmt::format(R"("ts":{:.3f})",
                       static_cast<double>(at(i, time) - zero_) / 1e3);
  }

  std::string period(size_t i, int64_t begin, int64_t end) const {
    return fmt::format(R"({},"dur":{:.3f})", when(i, begin),
                       static_cast<double>(end - begin) / 1e3);
  }

  static std::string named(const std::string& name, const char* category) {
    return fmt::format(R"("name":{},"cat":"{}")", json_text(name), category);
  }

  void put_meta(size_t i, uint64_t track, const char* what,
                const std::string& field) {
    put('M', i, track,
        fmt::format(R"("name":"{}","args":{{{}}})", what, field));
  }

  void name_tracks(size_t i);
  void name_track(size_t i, uint64_t track, const std::string& name);
  void put_slice(size_t i, const flight_slice& x);
  void put_async(size_t i, const flight_slice& x);
  void put_plan(std::span<const planned_slice> plan);
  void put_arrow(const char* name, size_t from, uint64_t from_track,
                 int64_t left, size_t to, uint64_t to_track, int64_t came);
  void put_arrows(size_t i);
  void put_replies(size_t i);
  std::string head() const;

  struct execution {
    size_t log;
    const flight_slice* slice;
  };

  std::ostream& out_;
  std::span<const flight_log> logs_;
  std::vector<flight_timeline> timelines_;
  std::vector<clock_offset> offsets_;
  int64_t zero_ = 0;
  std::map<request_id, execution> executions_;
  std::string text_;
  bool first_ = true;
  uint64_t next_ = 1; // arrow or period
};

void trace_writer::name_track(size_t i, uint64_t track,
                              const std::string& name) {
  put_meta(i, track, "thread_name",
           fmt::format(R"("name":{})", json_text(name)));
}

void trace_writer::name_tracks(size_t i) {
  auto& log = logs_[i];
  auto name = fmt::format("rank {} ({}, process {})", log.rank.value, log.host,
                          log.pid);
  put_meta(i, 0, "process_name", fmt::format(R"("name":{})", json_text(name)));
  put_meta(i, 0, "process_sort_index",
           fmt::format(R"("sort_index":{})", log.rank.value));
  name_track(i, user, "user's thread");
  name_track(i, executes, "executes");
  std::set<uint32_t> seen;
  for (auto& x : timelines_[i].slices)
    if (x.what == kind::execution && seen.insert(x.context).second)
      name_track(i, contexts + x.context, fmt::format("context {}", x.context));
}

/// What a slice is, for queries.
const char* kind_of(const flight_slice& x) {
  switch (x.what) {
    case kind::executing:
      return "executing";
    case kind::execution:
      return "execution";
    case kind::module:
      return "module";
    default:
      return category_of(x);
  }
}

void trace_writer::put_slice(size_t i, const flight_slice& x) {
  auto track = x.what == kind::step || x.what == kind::activity ? user
               : x.what == kind::executing                      ? executes
                                           : contexts + x.context;
  auto args = fmt::format(R"("kind":"{}","step":{})", kind_of(x), x.step);
  if (x.what == kind::executing || x.what == kind::execution
      || x.what == kind::module)
    args += fmt::format(R"(,"microbatch":{})", x.microbatch);
  if (x.request.number != 0)
    args += fmt::format(R"(,"request":"{}")", text_of(x.request));
  if (x.open)
    args += R"(,"open":true)";
  put('X', i, track,
      fmt::format(R"({},{},"args":{{{}}})", period(i, x.begin, x.end),
                  named(title_of(x, logs_[i]), category_of(x)), args));
}

/// Periods that overlap others of their kind. Their number is one of the
/// rank's: a global one would put them beside all ranks.
void trace_writer::put_async(size_t i, const flight_slice& x) {
  auto name = fmt::format(R"("id2":{{"local":"{}"}},{})", next_++,
                          named(title_of(x, logs_[i]), category_of(x)));
  put('b', i, user,
      fmt::format(R"({},{},"args":{{"bytes":{},"step":{}}})", when(i, x.begin),
                  name, x.bytes, x.step));
  put('e', i, user, fmt::format("{},{}", when(i, x.end), name));
}

void trace_writer::put_arrow(const char* name, size_t from, uint64_t from_track,
                             int64_t left, size_t to, uint64_t to_track,
                             int64_t came) {
  auto label = fmt::format(R"("id":{},{})", next_++, named(name, name));
  put('s', from, from_track, fmt::format("{},{}", when(from, left), label));
  put('f', to, to_track,
      fmt::format(R"({},{},"bp":"e")", when(to, came), label));
}

/// Arrows of the requests of one rank. Each leaves from a slice without length:
/// it is drawn from the end of the slice that it leaves from, and the wait for
/// the answer ends late.
void trace_writer::put_arrows(size_t i) {
  for (auto& x : timelines_[i].asked) {
    auto there = executions_.find(x.request);
    if (there == executions_.end())
      continue;
    auto& [log, slice] = there->second;
    put(
      'X', i, contexts + x.context,
      fmt::format(R"({},{},"args":{{"kind":"request","request":"{}"}})",
                  period(i, x.time, x.time),
                  named("asks for " + title_of(*slice, logs_[log]), "request"),
                  text_of(x.request)));
    put_arrow("request", i, contexts + x.context, x.time, log,
              contexts + slice->context, slice->begin);
  }
}

/// Each answer as a short slice, to which its arrow leads.
void trace_writer::put_replies(size_t i) {
  constexpr int64_t width = 1000; // ns, so that they can be seen
  int64_t last = std::numeric_limits<int64_t>::min();
  for (auto& x : timelines_[i].replies) {
    auto there = executions_.find(x.request);
    if (there == executions_.end() || there->second.slice->open)
      continue;
    if (last == std::numeric_limits<int64_t>::min())
      name_track(i, replies, "replies");
    auto& [log, slice] = there->second;
    auto time = std::max(x.time, last);
    last = time + width;
    put('X', i, replies,
        fmt::format(R"({},{},"args":{{"kind":"reply","request":"{}"}})",
                    period(i, time, time + width),
                    named(title_of(*slice, logs_[log]), category_of(*slice)),
                    text_of(x.request)));
    put_arrow("reply", log, contexts + slice->context, slice->end - 1, i,
              replies, time);
  }
}

void trace_writer::put_plan(std::span<const planned_slice> plan) {
  std::map<std::pair<uint64_t, uint32_t>, std::pair<size_t, int64_t>> begins;
  for (size_t i = 0; i < logs_.size(); ++i)
    for (auto& x : timelines_[i].slices)
      if (x.what == kind::step)
        begins[{logs_[i].rank.value, x.step}] = {i, x.begin};
  std::set<uint64_t> shown;
  for (auto& x : plan) {
    auto there = begins.find({x.rank.value, x.step});
    if (there == begins.end())
      continue;
    auto [i, begin] = there->second;
    if (shown.insert(x.rank.value).second)
      name_track(i, planned, "planned");
    auto name = fmt::format("planned {} mb {}",
                            x.in == phase::forward ? "forward" : "backward",
                            x.microbatch.value);
    put(
      'X', i, planned,
      fmt::format(R"({},{},"args":{{"kind":"planned","step":{}}})",
                  period(i, begin + x.begin, begin + x.end),
                  named(name, x.in == phase::forward ? "forward" : "backward"),
                  x.step));
  }
}

/// What is true of the whole trace.
std::string trace_writer::head() const {
  nlohmann::json ranks = nlohmann::json::array();
  for (size_t i = 0; i < logs_.size(); ++i) {
    nlohmann::json x{{"rank", logs_[i].rank.value},
                     {"clock_offset_ns", offsets_[i].offset},
                     {"clock_uncertainty_ns", offsets_[i].uncertainty},
                     {"events_lost", logs_[i].lost}};
    if (offsets_[i].by_date)
      x["clock_by_date"] = true;
    ranks.push_back(std::move(x));
  }
  return nlohmann::json{{"ranks", std::move(ranks)}}.dump();
}

void trace_writer::write(std::span<const planned_slice> plan) {
  out_ << R"({"displayTimeUnit":"ms","otherData":)" << head()
       << R"(,"traceEvents":[)";
  for (size_t i = 0; i < logs_.size(); ++i)
    for (auto& x : timelines_[i].slices)
      if (x.what == kind::execution)
        executions_.emplace(x.request, execution{i, &x});
  for (size_t i = 0; i < logs_.size(); ++i) {
    name_tracks(i);
    for (auto& x : timelines_[i].slices)
      if (x.what == kind::transfer || x.what == kind::collective)
        put_async(i, x);
      else
        put_slice(i, x);
    for (auto& [time, bytes] : timelines_[i].memory)
      put('C', i, 0,
          fmt::format(R"({},"name":"memory","args":{{"bytes":{}}})",
                      when(i, time), bytes));
    put_arrows(i);
    put_replies(i);
  }
  put_plan(plan);
  flush();
  out_ << "\n]}\n";
}

struct step_times {
  std::optional<int64_t> begin, end;
};

std::map<uint32_t, step_times> steps_of(const flight_log& x) {
  std::map<uint32_t, step_times> result;
  for (auto& y : x.events) {
    if (y.step == 0)
      continue; // no user counts it
    if (y.kind == flight_kind::step_begins)
      result[y.step].begin = y.time;
    else if (y.kind == flight_kind::step_ends)
      result[y.step].end = y.time;
  }
  return result;
}

} // namespace

std::pair<uint32_t, uint32_t> complete_steps(std::span<const flight_log> logs) {
  std::map<uint32_t, size_t> counts;
  for (auto& x : logs)
    for (auto& [step, times] : steps_of(x))
      counts[step] += times.begin && times.end ? 1 : 0;
  std::pair<uint32_t, uint32_t> result{0, 0};
  for (auto& [step, n] : counts)
    if (n == logs.size()) {
      if (result.first == 0)
        result.first = step;
      result.second = step;
    }
  return result;
}

void keep_steps(flight_log& x, uint32_t first, uint32_t last) {
  auto steps = steps_of(x);
  auto begin = std::numeric_limits<int64_t>::max();
  auto end = begin;
  for (auto& [step, times] : steps) {
    if (step >= first && step <= last && times.begin)
      begin = std::min(begin, *times.begin);
    if (step > last && times.begin)
      end = std::min(end, *times.begin);
  }
  std::erase_if(x.events,
                [&](auto& y) { return y.time < begin || y.time >= end; });
}

void write_trace(std::ostream& out, std::span<const flight_log> logs,
                 std::span<const planned_slice> plan) {
  trace_writer{out, logs}.write(plan);
}

} // namespace smp
