#include "apps/web/metrics_history.hpp"

#include "apps/report/text_layout.hpp"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <utility>

namespace smp::app {

namespace {

constexpr uint64_t bytes_at_once = uint64_t{4} << 20;

using line_json = nlohmann::json;

double number_in(const line_json& x, const char* key) {
  auto i = x.find(key);
  return i != x.end() && i->is_number() ? i->get<double>()
                                        : step_point::unknown;
}

uint64_t count_in(const line_json& x, const char* key) {
  auto i = x.find(key);
  return i != x.end() && i->is_number_unsigned() ? i->get<uint64_t>() : 0;
}

/// @returns the largest number of a list
double largest_in(const line_json& x, const char* key) {
  auto result = step_point::unknown;
  if (auto i = x.find(key); i != x.end() && i->is_array())
    for (auto& y : *i)
      if (y.is_number())
        result = std::fmax(result, y.get<double>());
  return result;
}

bool is_null(const line_json& x, const char* key) {
  auto i = x.find(key);
  return i != x.end() && i->is_null();
}

std::string text_in(const line_json& x, const char* key) {
  auto i = x.find(key);
  return i != x.end() && i->is_string() ? i->get<std::string>() : "";
}

/// What is worth a line of its own about a step.
std::vector<run_event> events_of(const line_json& x, const step_point& point) {
  std::vector<run_event> result;
  auto add = [&](std::string text, bool bad = false) {
    result.push_back(
      {fmt::format("step {}", point.step), std::move(text), bad});
  };
  if (auto seconds = number_in(x, "checkpoint_seconds"); seconds > 0)
    add(fmt::format("a checkpoint held it up for {}", duration_text(seconds)));
  if (auto why = text_in(x, "skipped"); !why.empty())
    add("updated nothing: " + why, true);
  else if (is_null(x, "loss") || is_null(x, "grad_norm"))
    add("the loss or the gradient is not finite", true);
  if (auto why = text_in(x, "ran_again"); !why.empty())
    add("ran again: " + why, true);
  if (std::isfinite(point.held_out_loss))
    add(fmt::format("held-out loss {:.4f}", point.held_out_loss));
  return result;
}

/// Of an object that is no step: what it says, key by key.
std::string text_of_object(const line_json& x) {
  std::string result;
  for (auto& [key, value] : x.items())
    result += fmt::format("{}{} {}", result.empty() ? "" : ", ", key,
                          value.is_string() ? value.get<std::string>()
                                            : value.dump());
  return result;
}

} // namespace

metrics_history::parsed_line metrics_history::parse(const std::string& line) {
  parsed_line result;
  auto x = line_json::parse(line, nullptr, false);
  if (!x.is_object() || x.empty())
    return result;
  auto step = x.find("step");
  auto is_step = step != x.end() && step->is_number_unsigned()
                 && x.contains("loss");
  if (!is_step) {
    result.events.push_back({"", text_of_object(x), true});
    return result;
  }
  auto& point = result.point.emplace();
  point.step = step->get<uint64_t>();
  point.loss = number_in(x, "loss");
  point.grad_norm = number_in(x, "grad_norm");
  point.lr = number_in(x, "lr");
  point.step_seconds = number_in(x, "step_seconds");
  point.samples_per_second = number_in(x, "samples_per_second");
  point.bubble_ratio = number_in(x, "bubble_ratio");
  point.device_memory = largest_in(x, "device_memory");
  point.held_out_loss = number_in(x, "held_out_loss");
  result.totals.steps = 1;
  result.totals.requests = count_in(x, "requests");
  result.totals.bytes_sent = count_in(x, "bytes_sent");
  result.totals.skipped = text_in(x, "skipped").empty() ? 0 : 1;
  result.totals.nonfinite = is_null(x, "loss") || is_null(x, "grad_norm");
  result.events = events_of(x, point);
  return result;
}

namespace {

void add_totals(step_totals& to, const step_totals& x) {
  to.steps += x.steps;
  to.requests += x.requests;
  to.bytes_sent += x.bytes_sent;
  to.nonfinite += x.nonfinite;
  to.skipped += x.skipped;
}

} // namespace

void metrics_history::commit(const parsed_line& x) {
  add_totals(totals_, x.totals);
  events_.insert(events_.end(), x.events.begin(), x.events.end());
  if (events_.size() > most_events)
    events_.erase(events_.begin(),
                  events_.end() - static_cast<std::ptrdiff_t>(most_events));
  if (!x.point)
    return;
  if (count_++ % stride_ == 0)
    points_.push_back(*x.point);
  if (points_.size() < most_points)
    return;
  size_t kept = 0;
  for (size_t i = 0; i < points_.size(); i += 2)
    points_[kept++] = points_[i];
  points_.resize(kept);
  stride_ *= 2;
}

bool metrics_history::update() {
  std::ifstream file{path_, std::ios::binary | std::ios::ate};
  if (!file)
    return false;
  auto size = static_cast<uint64_t>(file.tellg());
  if (size < offset_) // another run began here
    *this = metrics_history{path_};
  std::string text(std::min(size - offset_, bytes_at_once), '\0');
  file.seekg(static_cast<std::streamoff>(offset_));
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<size_t>(std::max<std::streamsize>(file.gcount(), 0)));
  const auto begin = offset_;
  size_t at = 0;
  for (auto end = text.find('\n'); end != std::string::npos;
       end = text.find('\n', at)) {
    // The one that was last is read again, as it may have changed.
    if (at > 0)
      commit(*open_);
    open_ = parse(text.substr(at, end - at));
    if (open_->point)
      last_ = open_->point;
    offset_ = begin + at;
    at = end + 1;
  }
  // A line that is longer than what is read at once is no line of ours.
  if (offset_ == begin && text.size() == bytes_at_once) {
    if (open_)
      commit(*std::exchange(open_, std::nullopt));
    offset_ = begin + text.size();
  }
  return size > begin + text.size();
}

std::vector<step_point> metrics_history::points() const {
  auto result = points_;
  if (open_ && open_->point)
    result.push_back(*open_->point);
  return result;
}

step_totals metrics_history::totals() const {
  auto result = totals_;
  if (open_)
    add_totals(result, open_->totals);
  return result;
}

std::vector<run_event> metrics_history::events() const {
  auto result = events_;
  if (open_)
    result.insert(result.end(), open_->events.begin(), open_->events.end());
  return result;
}

} // namespace smp::app
