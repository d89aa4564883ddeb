#include "apps/report/rank_table.hpp"

#include "apps/report/text_layout.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <string_view>
#include <tuple>

namespace smp::app {

namespace {

using kind = activity::kind;
using style = table_line::style;

bool is_step_end(const activity& x) {
  return x.subject.what == wait_subject::kind::step_end;
}

/// What tells most about a rank that waits or executes in several places.
const activity* most_telling(const std::vector<activity>& xs) {
  auto key = [](const activity& x) {
    return std::tuple{x.executes && x.who == kind::context,
                      x.executes && x.who == kind::main,
                      !is_step_end(x) && x.who != kind::queued,
                      x.who == kind::context, x.seconds};
  };
  auto i = std::max_element(
    xs.begin(), xs.end(), [&key](auto& x, auto& y) { return key(x) < key(y); });
  return i == xs.end() ? nullptr : &*i;
}

std::string text_of(const activity& x) {
  if (x.executes)
    return x.brief.empty() ? x.what : x.brief;
  if (is_step_end(x))
    return "IDLE";
  auto from = x.from == no_rank ? std::string{}
                                : fmt::format(" <- r{}", x.from.value);
  return "WAIT " + (x.awaits.empty() ? x.waits_for : x.awaits) + from;
}

template <class T, class F>
std::string cell(const std::optional<T>& x, F text) {
  return x ? text(*x) : "-";
}

std::string percent(double x) {
  return fmt::format("{:.0f} %", 100 * std::clamp(x, 0.0, 1.0));
}

std::string bytes_cell(const std::optional<uint64_t>& x) {
  return cell(x, bytes_text);
}

std::string number_cell(const std::optional<uint64_t>& x) {
  return cell(x, [](uint64_t y) { return std::to_string(y); });
}

std::string rate_cell(const std::optional<double>& x) {
  return cell(x, [](double y) { return bytes_text(static_cast<uint64_t>(y)); });
}

/// Cuts at a character, not in the middle of one.
std::string cut(std::string x, size_t width) {
  if (x.size() <= width)
    return x;
  while (width > 0 && (static_cast<uint8_t>(x[width]) & 0xc0) == 0x80)
    --width;
  x.resize(width);
  return x;
}

/// A column to the right of the state.
struct column {
  std::string_view title;
  size_t width;
  std::string (*text)(const rank_row&);
};

constexpr column of_ranks[] = {
  {"busy", 6, [](auto& x) { return cell(x.busy, percent); }},
  {"bubble", 8, [](auto& x) { return cell(x.bubble, percent); }},
  {"queue", 7, [](auto& x) { return number_cell(x.queue); }},
  {"out/s", 10, [](auto& x) { return rate_cell(x.out); }},
  {"in/s", 10, [](auto& x) { return rate_cell(x.in); }},
  {"arena", 10, [](auto& x) { return bytes_cell(x.arena); }},
  {"memory", 10, [](auto& x) { return bytes_cell(x.memory); }}};

constexpr column of_devices[] = {
  {"device", 9, [](auto& x) { return x.device.empty() ? "-" : x.device; }},
  {"used", 10, [](auto& x) { return bytes_cell(x.device_memory); }},
  {"peak", 10, [](auto& x) { return bytes_cell(x.device_peak_memory); }},
  {"of", 10, [](auto& x) { return bytes_cell(x.device_total_memory); }}};

constexpr size_t rank_width = 4;
constexpr size_t least_state = 12;

size_t width_of(const std::vector<column>& xs) {
  size_t result = rank_width + 2;
  for (auto& x : xs)
    result += x.width;
  return result;
}

std::vector<column> columns_for(const std::vector<rank_row>& rows,
                                size_t width) {
  std::vector<column> result(std::begin(of_ranks), std::end(of_ranks));
  if (std::ranges::all_of(rows, &std::string::empty, &rank_row::device))
    return result;
  result.insert(result.end(), std::begin(of_devices), std::end(of_devices));
  constexpr size_t readable_state = 20;
  for (auto* title : {"arena", "in/s", "out/s", "memory"})
    if (width_of(result) + readable_state > width)
      std::erase_if(result, [title](auto& x) { return x.title == title; });
  return result;
}

void add_device(rank_row& to, const device_status& x) {
  to.device = x.name;
  to.device_total_memory = x.total_memory;
  if (x.peak_memory == 0)
    return;
  to.device_memory = x.memory;
  to.device_peak_memory = x.peak_memory;
}

std::string header_of(const std::string& place, const run_look& x) {
  auto result = fmt::format("{}  {}", place, to_string(x.what));
  if (auto progress = progress_text(x.files); !progress.empty())
    result += "  " + progress;
  auto& last = x.files.last;
  if (!last || x.what != run_look::state::live)
    return result;
  auto tokens = x.files.tokens_per_sample;
  result += fmt::format(
    "  {} {}",
    rate_text(last->samples_per_second
              * static_cast<double>(std::max<uint64_t>(tokens, 1))),
    tokens > 0 ? "tokens/s" : "samples/s");
  if (x.files.steps > last->step)
    result += fmt::format(
      "  ETA {}", duration_text(static_cast<double>(x.files.steps - last->step)
                                * last->step_seconds));
  return result;
}

} // namespace

std::string state_of(const rank_entry& x) {
  auto& view = x.status.view;
  auto* what = x.known ? most_telling(view.activities) : nullptr;
  auto text = what != nullptr ? text_of(*what) : std::string{};
  switch (x.health) {
    case rank_health::well:
      return view.left ? "LEAVING" : text;
    case rank_health::blocked:
      return "BLOCKED " + text;
    case rank_health::silent:
    case rank_health::stopped:
      return fmt::format("{} {} ({})", in_capitals(smp::to_string(x.health)),
                         duration_text(x.seconds), text);
    default:
      return in_capitals(smp::to_string(x.health));
  }
}

std::vector<rank_row> rank_rows::add(const run_look& x, time_point now) {
  std::vector<rank_row> result;
  if (!x.status) {
    last_.clear();
    return result;
  }
  last_.resize(x.status->ranks.size());
  for (size_t i = 0; i < last_.size(); ++i) {
    auto& entry = x.status->ranks[i];
    auto& status = entry.status;
    rank_row row;
    row.rank = entry.rank.value;
    row.health = entry.health;
    row.state = state_of(entry);
    auto fresh = entry.health == rank_health::well
                 || entry.health == rank_health::blocked;
    if (entry.known) {
      row.bytes_sent = status.comm.bytes_sent;
      row.bytes_received = status.comm.bytes_received;
      row.arena = status.comm.arena_high_water();
      row.memory = status.memory;
      row.peak_memory = status.peak_memory;
      if (auto& device = status.device)
        add_device(row, *device);
    }
    if (!entry.known || !fresh) {
      last_[i].reset();
      result.push_back(std::move(row));
      continue;
    }
    row.bubble = status.bubble;
    if (entry.health == rank_health::well)
      row.queue = status.queue;
    sample s{status.up_seconds, status.busy_seconds, status.comm.bytes_sent,
             status.comm.bytes_received, now};
    if (auto& old = last_[i]; old && s.up > old->up) {
      row.busy = (s.busy - old->busy) / (s.up - old->up);
      row.out = static_cast<double>(s.sent - old->sent) / (s.up - old->up);
      row.in = static_cast<double>(s.received - old->received)
               / (s.up - old->up);
    }
    last_[i] = s;
    result.push_back(std::move(row));
  }
  return result;
}

std::vector<table_line> table_of(const std::string& place, const run_look& x,
                                 const std::vector<rank_row>& rows,
                                 size_t width) {
  std::vector<table_line> result;
  auto add = [&](const std::string& text, style how) {
    auto line = printable(text);
    std::replace(line.begin(), line.end(), '\n', ' ');
    result.push_back({cut(std::move(line), width), how});
  };
  add(header_of(place, x), style::title);
  if (x.what != run_look::state::live && !x.text.empty())
    add(x.text,
        x.what == run_look::state::unreachable ? style::bad : style::plain);
  for (auto& line : problems_of(x))
    if (line != x.text)
      add(line, style::bad);
  if (rows.empty())
    return result;
  auto columns = columns_for(rows, width);
  auto others = width_of(columns);
  auto states = std::max(width > others ? width - others : 0, least_state);
  auto begin_of = [states](const auto& rank, const std::string& state) {
    return fmt::format("{:>{}}  {:<{}}", rank, rank_width, state, states);
  };
  auto line = begin_of("rank", "state");
  for (auto& x : columns)
    line += fmt::format("{:>{}}", x.title, x.width);
  add({}, style::plain);
  add(line, style::head);
  for (auto& row : rows) {
    line = begin_of(row.rank, cut(row.state, states - 1));
    for (auto& x : columns)
      line += fmt::format("{:>{}}", x.text(row), x.width);
    add(line, is_well(row.health) ? style::plain : style::bad);
  }
  return result;
}

} // namespace smp::app
