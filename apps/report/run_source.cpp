#include "apps/report/run_source.hpp"

#include "actors/flight/trace_file.hpp"
#include "transport/error.hpp"
#include "transport/network/addresses.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <span>
#include <thread>
#include <utility>

namespace smp::app {

namespace {

/// A live run answers within milliseconds, or knows after 0.4 s which ranks do
/// not. Together these limits are less than a second.
constexpr std::chrono::milliseconds connect_limit{350};
constexpr std::chrono::milliseconds answer_limit{550};

/// @returns the entry of a run at HOST:PORT; nullopt if `x` is none
std::optional<inspection_entry> entry_at(const std::string& x) {
  auto parts = parse_endpoint(x);
  if (!parts || parts->port == 0)
    return std::nullopt;
  inspection_entry result;
  result.address = std::move(parts->host);
  result.port = parts->port;
  return result;
}

bool is_of_living(const std::optional<inspection_entry>& x) {
  return x && !is_orphaned(*x);
}

} // namespace

const char* to_string(run_look::state x) noexcept {
  switch (x) {
    case run_look::state::live:
      return "running";
    case run_look::state::starting:
      return "starting";
    case run_look::state::ended:
      return "ended";
    case run_look::state::unreachable:
      return "unreachable";
  }
  return "unknown";
}

std::vector<std::string> problems_of(const run_look& x) {
  std::vector<std::string> result;
  if (x.what == run_look::state::unreachable)
    result.push_back(x.text);
  if (!x.status)
    return result;
  auto& status = *x.status;
  for (auto& y : status.ranks)
    if (!is_well(y.health)) {
      auto line = fmt::format("rank {} is {}: {}", y.rank.value,
                              smp::to_string(y.health), y.why);
      if (y.health == rank_health::silent || y.health == rank_health::stopped)
        line += fmt::format(", last heard of {:.1f} s ago", y.seconds);
      result.push_back(std::move(line));
    }
  if (status.stalls.standing)
    result.push_back("stall: " + status.stalls.text);
  for (auto& y : status.actors)
    if (!y.answers)
      result.push_back(fmt::format("the {} does not answer", y.name));
  return result;
}

run_source::run_source(std::string place, std::string secret_file)
  : place_(std::move(place)) {
  std::error_code ignored;
  if (std::filesystem::is_directory(place_, ignored)) {
    if (!read_run_files(place_).found && !read_entry(entry_path(place_)))
      throw config_error(place_ + ": not a run directory: a run leaves "
                                  "log-0.txt, and smp-train config.toml and "
                                  "metrics.jsonl");
    return;
  }
  address_ = entry_at(place_);
  if (!address_)
    throw config_error(place_ + ": neither a directory nor HOST:PORT");
  if (secret_file.empty())
    throw config_error(place_ + ": an address needs --secret FILE, a copy of "
                                "the run directory's inspect.entry");
  auto entry = read_entry(secret_file);
  if (!entry)
    throw config_error(secret_file + ": cannot be read");
  address_->secret = entry->secret;
}

run_look run_source::look(std::chrono::milliseconds patience) {
  run_look result;
  if (address_) {
    ask(*address_, result, patience);
    return result;
  }
  result.files = read_run_files(place_);
  auto entry = read_entry(entry_path(place_));
  const auto asked = is_of_living(entry);
  if (asked)
    ask(*entry, result, patience);
  if (asked && result.what != run_look::state::unreachable)
    return result;
  // The run may have begun or ended just now.
  entry = read_entry(entry_path(place_));
  if (is_of_living(entry)) {
    if (!asked)
      ask(*entry, result, patience);
    return result;
  }
  client_.reset();
  result.files = read_run_files(place_);
  look_at_files(result);
  if (entry && !result.files.exit_code)
    result.text += fmt::format("; its process {} was killed", entry->pid);
  return result;
}

namespace {

/// For large answers of busy ranks.
constexpr std::chrono::seconds events_limit{10};

/// Adds the records that a run left of ranks that are not in `to`.
void add_left_records(const std::string& run_dir, std::vector<flight_log>& to) {
  std::error_code ignored;
  for (auto& file : std::filesystem::directory_iterator{run_dir, ignored}) {
    auto name = file.path().filename().string();
    constexpr std::string_view prefix = "flight-";
    if (!name.starts_with(prefix)
        || name.find_first_not_of("0123456789", prefix.size()) != name.npos)
      continue; // or it is still being written
    std::ifstream in{file.path(), std::ios::binary};
    std::string bytes{std::istreambuf_iterator<char>{in}, {}};
    try {
      auto log = read_flight_image(std::as_bytes(std::span{bytes}));
      auto is_it = [&](auto& x) { return x.rank == log.rank; };
      if (std::ranges::none_of(to, is_it))
        to.push_back(std::move(log));
    } catch (const error& e) {
      throw error{e.code(), file.path().string() + ": " + e.cause().text};
    }
  }
  std::ranges::sort(to, {}, &flight_log::rank);
}

} // namespace

std::vector<flight_log> run_source::events(const run_look& now) {
  std::vector<flight_log> result;
  if (now.status && client_)
    result = client_->events(events_limit);
  if (!address_)
    add_left_records(place_, result);
  return result;
}

std::vector<flight_log> run_source::recent_events(const run_look& now) {
  if (!now.status || !client_)
    return {};
  return client_->recent_events(events_limit);
}

std::vector<process_stacks> run_source::stacks(const run_look& now) {
  if (!now.status || !client_)
    return {};
  return client_->stacks(events_limit);
}

std::vector<flight_log> run_source::trace(const run_look& now, uint64_t steps,
                                          std::chrono::seconds limit) {
  if (!now.status || !client_)
    throw config_error(place_ + ": only a run that answers can be traced; what "
                                "its ranks did last: smp-inspect RUN flight");
  client_->begin_trace(events_limit);
  const auto begin = now.status->ranks;
  const auto end = std::chrono::steady_clock::now() + limit;
  // The step that runs now is not seen from its beginning.
  auto is_done = [&](const run_status& x) {
    for (size_t i = 0; i < x.ranks.size(); ++i)
      if (is_well(x.ranks[i].health)
          && x.ranks[i].status.step.value
               <= begin[i].status.step.value + steps + 1)
        return false;
    return true;
  };
  while (!is_done(client_->ask(events_limit))) {
    if (std::chrono::steady_clock::now() > end) {
      client_->finish_trace(events_limit);
      throw error{error_code::stalled,
                  fmt::format("{}: {} steps are not over after {} s; trace "
                              "fewer, or give more time with --limit",
                              place_, steps, limit.count())};
    }
    std::this_thread::sleep_for(std::chrono::milliseconds{100});
  }
  auto result = client_->finish_trace(events_limit);
  auto [first, last] = complete_steps(result);
  if (last == 0)
    throw error{error_code::stalled,
                place_ + ": no step was seen from its beginning to its end on "
                         "all ranks"};
  first = last - first >= steps ? last - static_cast<uint32_t>(steps) + 1
                                : first;
  for (auto& x : result)
    keep_steps(x, first, last);
  return result;
}

void run_source::ask(const inspection_entry& x, run_look& to,
                     std::chrono::milliseconds patience) {
  if (x.port == 0) {
    to.what = run_look::state::starting;
    to.text = "its session has not begun";
    return;
  }
  const auto end = std::chrono::steady_clock::now() + patience;
  int times = 1;
  while (ask_once(x, to, times) && may_still_answer(x)
         && std::chrono::steady_clock::now() < end)
    times *= 2;
  if (to.what == run_look::state::unreachable && !to.files.stall.empty())
    to.text += "; its last report of a stall: " + to.files.stall;
}

bool run_source::ask_once(const inspection_entry& x, run_look& to, int times) {
  auto begin = std::chrono::steady_clock::now();
  try {
    if (!client_)
      client_ = std::make_unique<run_client>(x, times * connect_limit);
    to.status = client_->ask(times * answer_limit);
    to.what = run_look::state::live;
    to.text.clear();
    return false;
  } catch (const error& e) {
    client_.reset();
    to.what = run_look::state::unreachable;
    to.text = e.what();
  }
  return std::chrono::steady_clock::now() - begin >= times * connect_limit;
}

void run_source::look_at_files(run_look& to) const {
  auto& files = to.files;
  to.what = run_look::state::ended;
  auto progress = progress_text(files);
  if (files.exit_code)
    to.text = fmt::format("the run ended with exit code {}", *files.exit_code);
  else if (files.finished())
    to.text = "the run is done";
  else
    to.text = "the run is over";
  if (!progress.empty())
    to.text += " after " + progress;
  else if (files.steps > 0) // else the number of steps is unknown
    to.text += " before the end of its first step";
  if (files.restarts > 0)
    to.text += fmt::format(" and {} restart{}", files.restarts,
                           files.restarts == 1 ? "" : "s");
  if (!files.cause.empty())
    to.text += ": " + files.cause;
}

} // namespace smp::app
