#include "apps/report/rank_table.hpp"

#include "actors/flight/clock_offsets.hpp"
#include "apps/report/activity_strip.hpp"
#include "apps/report/text_layout.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <iterator>
#include <limits>
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

/// @returns the first characters
std::string cut(std::string x, size_t width) {
  size_t characters = 0;
  for (size_t i = 0; i < x.size(); ++i)
    if ((static_cast<uint8_t>(x[i]) & 0xc0) != 0x80 && characters++ == width) {
      x.resize(i);
      break;
    }
  return x;
}

/// In characters; of what `printable` made.
size_t length_of(std::string_view x) {
  return static_cast<size_t>(std::ranges::count_if(
    x, [](char y) { return (static_cast<uint8_t>(y) & 0xc0) != 0x80; }));
}

constexpr std::string_view eighths[] = {"", "▏", "▎", "▍", "▌", "▋", "▊", "▉"};

/// @returns a bar and the share in words: "█████▌     55 %"
std::string bar(double x, size_t width) {
  x = std::clamp(x, 0.0, 1.0);
  auto parts = static_cast<size_t>(x * static_cast<double>(width) * 8 + 0.5);
  std::string result;
  for (size_t i = 0; i < parts / 8; ++i)
    result += "█";
  result += eighths[parts % 8];
  auto used = parts / 8 + (parts % 8 > 0 ? 1 : 0);
  return result + std::string(width - used, ' ')
         + fmt::format("{:>6}", percent(x));
}

/// @returns the numbers as a line that goes up and down, a character each
std::string sparkline(const std::vector<double>& xs, size_t width) {
  constexpr std::string_view heights[] = {"▁", "▂", "▃", "▄",
                                          "▅", "▆", "▇", "█"};
  auto first = xs.size() - std::min(xs.size(), width);
  auto [low, high] = std::minmax_element(
    xs.begin() + static_cast<std::ptrdiff_t>(first), xs.end());
  std::string result;
  for (auto i = first; i < xs.size(); ++i) {
    auto share = *high > *low ? (xs[i] - *low) / (*high - *low) : 0.0;
    result += heights[static_cast<size_t>(share * 7 + 0.5)];
  }
  return result;
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

constexpr size_t bar_width = 10;

constexpr column bars[] = {
  {"busy", 18,
   [](auto& x) {
     return cell(x.busy, [](double y) { return bar(y, bar_width); });
   }},
  {"bubble", 18, [](auto& x) {
     return cell(x.bubble, [](double y) { return bar(y, bar_width); });
   }}};

constexpr column of_places[] = {
  {"pp/tp/dp", 10, [](auto& x) { return x.place.empty() ? "-" : x.place; }}};

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
  constexpr size_t readable_state = 20;
  std::vector<column> result(std::begin(of_ranks), std::end(of_ranks));
  if (!std::ranges::all_of(rows, &std::string::empty, &rank_row::device))
    result.insert(result.end(), std::begin(of_devices), std::end(of_devices));
  // What a wide screen has room for.
  constexpr size_t wide_state = 36;
  auto room = [&] { return width_of(result) + wide_state; };
  for (size_t i = 0; i < 2; ++i)
    if (room() + bars[i].width - result[i].width <= width)
      result[i] = bars[i];
  auto alone = std::ranges::all_of(
    rows, [](auto& x) { return x.place.empty() || x.place.ends_with("/0/0"); });
  if (!alone && room() + of_places[0].width <= width)
    result.insert(result.begin(), of_places[0]);
  // What a narrow one has not.
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

/// @returns "loss ▇▅▃▂▁  grad norm 1.2  bubble 11 %  checkpoint step 30, 2m10s
/// ago"; empty before the first step
std::string second_header_of(const run_look& x) {
  auto& last = x.files.last;
  if (!last)
    return {};
  constexpr size_t width = 40;
  std::string result;
  if (last->losses.size() > 1)
    result += "loss " + sparkline(last->losses, width) + "  ";
  if (last->grad_norm)
    result += fmt::format("grad norm {:.3g}  ", *last->grad_norm);
  if (last->bubble)
    result += fmt::format("bubble {}  ", percent(*last->bubble));
  if (x.files.checkpoint) {
    std::chrono::duration<double> age = std::chrono::system_clock::now()
                                        - x.files.checkpoint_time;
    result += fmt::format("checkpoint step {}, {} ago", *x.files.checkpoint,
                          duration_text(std::max(age.count(), 0.0)));
  }
  return result;
}

style style_of(strip_cell x) {
  switch (x) {
    case strip_cell::forward:
      return style::forward;
    case strip_cell::backward:
      return style::backward;
    case strip_cell::wait:
      return style::wait;
    case strip_cell::communication:
      return style::communication;
    case strip_cell::optimizer:
      return style::optimizer;
    case strip_cell::idle:
      break;
  }
  return style::plain;
}

/// Adds a cell, as part of a mark if its neighbour looks the same.
void add_cell(table_line& to, size_t at, strip_cell x) {
  to.text += letter_of(x);
  if (x == strip_cell::idle)
    return;
  auto how = style_of(x);
  if (!to.marks.empty() && to.marks.back().how == how
      && to.marks.back().begin + to.marks.back().size == at)
    ++to.marks.back().size;
  else
    to.marks.push_back({at, 1, how});
}

/// What the letters and colours mean.
table_line legend(double seconds) {
  table_line result;
  result.how = style::head;
  result.text = fmt::format("last {}", duration_text(seconds));
  for (auto x :
       {strip_cell::forward, strip_cell::backward, strip_cell::optimizer,
        strip_cell::communication, strip_cell::wait}) {
    result.text += "   ";
    result.marks.push_back({result.text.size(), 1, style_of(x)});
    result.text += fmt::format("{} {}", letter_of(x), name_of(x));
  }
  return result;
}

} // namespace

const char* to_string(row_order x) noexcept {
  switch (x) {
    case row_order::rank:
      return "rank";
    case row_order::busy:
      return "busy";
    case row_order::bubble:
      return "bubble";
    case row_order::queue:
      return "queue";
    case row_order::memory:
      return "memory";
  }
  return "";
}

void sort_rows(std::vector<rank_row>& rows, row_order x) {
  auto key = [x](const rank_row& y) -> double {
    switch (x) {
      case row_order::busy:
        return y.busy.value_or(-1);
      case row_order::bubble:
        return y.bubble.value_or(-1);
      case row_order::queue:
        return static_cast<double>(y.queue.value_or(0));
      case row_order::memory:
        return static_cast<double>(y.device.empty()
                                     ? y.memory.value_or(0)
                                     : y.device_memory.value_or(0));
      case row_order::rank:
        break;
    }
    return -static_cast<double>(y.rank);
  };
  std::ranges::stable_sort(rows, std::greater{}, key);
}

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
      row.place = fmt::format("{}/{}/{}", status.pp_rank, status.tp_rank,
                              status.rdp_rank);
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
  if (auto second = second_header_of(x); !second.empty())
    add(second, style::plain);
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
    std::vector<table_line::mark> marks;
    for (auto& x : columns) {
      auto text = x.text(row);
      auto blanks = x.width - std::min(x.width, length_of(text));
      if (x.width == bars[0].width && length_of(text) > bar_width)
        marks.push_back({length_of(line) + blanks, bar_width, style::bar});
      line += std::string(blanks, ' ') + text;
    }
    add(line, is_well(row.health) ? style::plain : style::bad);
    result.back().marks = std::move(marks);
  }
  return result;
}

std::vector<table_line> strips_of(const std::vector<flight_log>& logs,
                                  const std::vector<rank_row>& rows,
                                  size_t width) {
  constexpr int64_t longest = 10'000'000'000; // ns
  constexpr size_t begin_of_strip = rank_width + 2;
  if (logs.empty() || width <= begin_of_strip + 10)
    return {};
  std::vector<flight_timeline> timelines;
  for (auto& x : logs)
    timelines.push_back(timeline_of(x));
  auto offsets = clock_offsets(logs, timelines);
  // The last event of all; and what all records reach back to.
  auto end = std::numeric_limits<int64_t>::min();
  auto begin = end;
  for (size_t i = 0; i < logs.size(); ++i)
    if (auto& events = logs[i].events; !events.empty()) {
      end = std::max(end, events.back().time + offsets[i].offset);
      begin = std::max(begin, events.front().time + offsets[i].offset);
    }
  begin = std::max(begin, end - longest);
  if (end <= begin)
    return {};
  std::vector<table_line> result{
    {}, legend(static_cast<double>(end - begin) * 1e-9)};
  for (auto& row : rows)
    for (size_t i = 0; i < logs.size(); ++i) {
      if (logs[i].rank.value != row.rank)
        continue;
      auto optimizer = logs[i].number_of("optimizer");
      table_line line;
      line.text = fmt::format("{:>{}}  ", row.rank, rank_width);
      auto at = begin_of_strip;
      for (auto cell :
           strip_of(timelines[i], optimizer, begin - offsets[i].offset,
                    end - offsets[i].offset, width - begin_of_strip - 1))
        add_cell(line, at++, cell);
      result.push_back(std::move(line));
    }
  return result;
}

std::vector<table_line> lines_of(const std::string& text, size_t width) {
  std::vector<table_line> result;
  for (size_t at = 0; at < text.size();) {
    auto end = std::min(text.find('\n', at), text.size());
    result.push_back({cut(printable(text.substr(at, end - at)), width)});
    at = end + 1;
  }
  return result;
}

} // namespace smp::app
