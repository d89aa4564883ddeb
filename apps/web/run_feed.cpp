#include "apps/web/run_feed.hpp"

#include "apps/report/left_behind.hpp"
#include "apps/report/text_layout.hpp"
#include "apps/web/pipeline_grid.hpp"
#include "transport/error.hpp"

#include <fmt/chrono.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <utility>

namespace smp::app {

namespace {

/// Records of ranks are asked for once in this multiple of the time that it
/// takes.
constexpr int rest_after_events = 10;

constexpr size_t most_seen = 100;

std::string now_text() {
  auto now = std::time(nullptr);
  std::tm local{};
  ::localtime_r(&now, &local);
  return fmt::format("{:%H:%M:%S}", local);
}

json number_or_null(double x) {
  return std::isfinite(x) ? json(x) : json{};
}

json event_json(const run_event& x) {
  return {
    {"when", printable(x.when)}, {"text", printable(x.text)}, {"bad", x.bad}};
}

} // namespace

double oldest_request(const rank_entry& x) {
  double result = 0;
  if (x.known)
    for (auto& y : x.status.view.activities)
      if (y.who == activity::kind::context || y.who == activity::kind::queued)
        result = std::max(result, y.seconds);
  return result;
}

json ranks_json(const run_look& x, const std::vector<rank_row>& rows) {
  auto result = json::array();
  for (auto& row : rows) {
    auto y = to_json(row);
    auto& entry = x.status->ranks[result.size()];
    y["why"] = printable(entry.why);
    if (entry.known) {
      auto& status = entry.status;
      y["pp"] = status.pp_rank;
      y["host"] = printable(status.host);
      y["pid"] = status.pid;
      y["step"] = status.step.value;
      y["oldest"] = oldest_request(entry);
    }
    result.push_back(std::move(y));
  }
  return result;
}

json metrics_json(const std::vector<step_point>& xs) {
  if (xs.empty())
    return {};
  json result;
  for (auto& x : xs) {
    result["step"].push_back(x.step);
    result["loss"].push_back(number_or_null(x.loss));
    result["held_out_loss"].push_back(number_or_null(x.held_out_loss));
    result["grad_norm"].push_back(number_or_null(x.grad_norm));
    result["samples_per_second"].push_back(
      number_or_null(x.samples_per_second));
    result["bubble_ratio"].push_back(number_or_null(x.bubble_ratio));
    result["device_memory"].push_back(number_or_null(x.device_memory));
  }
  return result;
}

json traffic_json(const run_status& x) {
  auto result = json::array();
  for (auto& rank : x.ranks)
    if (rank.known)
      for (auto& y : rank.status.view.peers)
        result.push_back({{"from", rank.rank.value},
                          {"to", y.peer.value},
                          {"messages", y.sent},
                          {"queued", y.queued}});
  return result;
}

run_feed::run_feed(std::string place, std::string secret_file)
  : source_(std::move(place), std::move(secret_file)),
    history_(source_.place() + "/metrics.jsonl") {
  // nop
}

json run_feed::look(std::chrono::milliseconds patience) {
  auto now = source_.look(patience);
  auto rows = rows_.add(now, clock::now());
  while (history_.update()) {
    // of a long run, some megabytes at a time
  }
  auto run = head_json(source_.place(), now);
  run["time"] = std::chrono::duration_cast<std::chrono::milliseconds>(
                  std::chrono::system_clock::now().time_since_epoch())
                  .count();
  run["tokens_per_sample"] = now.files.tokens_per_sample;
  json result{{"run", std::move(run)}};
  auto& status = now.status;
  result["ranks"] = status ? ranks_json(now, rows) : json{};
  result["waits"] = status ? waits_json(*status)
                           : stored_waits(source_.place());
  result["traffic"] = status ? traffic_json(*status) : json{};
  result["grid"] = grid_of(now);
  result["metrics"] = metrics_json(history_.points());
  if (partition_.is_null()) // it is written once
    partition_ = stored_partition(source_.place());
  result["partition"] = partition_;
  note_problems(now);
  result["events"] = events_of(now);
  return result;
}

json run_feed::grid_of(const run_look& x) {
  const auto begin = clock::now();
  if (begin < next_events_)
    return grid_;
  try {
    auto logs = source_.events(x);
    grid_ = grid_json(logs, x.status ? x.status->stalls.quiet_seconds : 0);
  } catch (const error& e) {
    // The rest of the page does not depend on it.
    grid_ = {{"problem", printable(e.what())}};
  }
  next_events_ = clock::now() + rest_after_events * (clock::now() - begin);
  return grid_;
}

/// The run does not say when something became wrong, so whoever looks must.
void run_feed::note_problems(const run_look& x) {
  auto kind_of = [](const std::string& line) {
    return line.substr(0, line.find(", last heard of"));
  };
  std::set<std::string> now;
  for (auto& line : problems_of(x))
    now.insert(kind_of(line));
  for (auto& line : now)
    if (!problems_.contains(line))
      seen_.push_back({now_text(), line, true});
  for (auto& line : problems_)
    if (!now.contains(line))
      seen_.push_back({now_text(), "no more: " + line, false});
  problems_ = std::move(now);
  while (seen_.size() > most_seen)
    seen_.pop_front();
}

json run_feed::events_of(const run_look& x) const {
  auto result = json::array();
  for (auto& y : history_.events())
    result.push_back(event_json(y));
  if (!x.files.stall.empty())
    result.push_back(event_json({"", "stall: " + x.files.stall, true}));
  for (auto& y : seen_)
    result.push_back(event_json(y));
  if (x.what == run_look::state::ended)
    result.push_back(event_json(
      {"end", x.text, x.files.exit_code && *x.files.exit_code != 0}));
  return result;
}

} // namespace smp::app
