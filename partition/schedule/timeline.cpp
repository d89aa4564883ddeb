#include "partition/schedule/timeline.hpp"

#include <algorithm>
#include <cstdio>

namespace smp {

namespace {

template <class... Ts>
std::string format(const char* pattern, Ts... xs) {
  char buffer[256];
  std::snprintf(buffer, sizeof(buffer), pattern, xs...);
  return buffer;
}

size_t rows_of(const schedule_report& x, const timeline_options& options) {
  return std::min(x.busy.size(), options.max_rows);
}

char symbol(const task& x) {
  auto digit = static_cast<char>(x.microbatch.value % 10);
  return static_cast<char>((x.what == phase::forward ? '0' : 'a') + digit);
}

/// One row of cells; each remembers what took most of its time so far.
class cell_row {
public:
  cell_row(size_t width, double makespan)
    : cells_(width, '.'), taken_(width), cell_(makespan / double(width)) {
    // nop
  }

  void add(const timeline_entry& x) {
    for (auto i = static_cast<size_t>(x.begin / cell_);
         i < cells_.size() && double(i) * cell_ < x.end; ++i) {
      auto begin = std::max(x.begin, double(i) * cell_);
      auto end = std::min(x.end, double(i + 1) * cell_);
      // A cell that is idle for most of its time stays a dot.
      if (end - begin > taken_[i] && 2 * (end - begin) > 0.999 * cell_) {
        taken_[i] = end - begin;
        cells_[i] = symbol(x.what);
      }
    }
  }

  std::string text(bool colour) const {
    if (!colour)
      return cells_;
    std::string result;
    auto style = [](char c) {
      return c == '.' ? "\x1b[2m" : c <= '9' ? "\x1b[30;46m" : "\x1b[30;43m";
    };
    for (size_t i = 0; i < cells_.size(); ++i) {
      if (i == 0 || style(cells_[i]) != style(cells_[i - 1]))
        result += std::string{"\x1b[0m"} + style(cells_[i]);
      result += cells_[i];
    }
    return result + "\x1b[0m";
  }

private:
  std::string cells_;
  std::vector<double> taken_;
  double cell_;
};

std::string summary(const schedule_report& x) {
  auto most = std::max_element(x.peak_live.begin(), x.peak_live.end());
  auto where = most - x.peak_live.begin();
  return format("makespan %.4g s, bubble %.1f %%, ", x.makespan, 100 * x.bubble)
         + format("at most %llu microbatches live",
                  static_cast<unsigned long long>(*most))
         + format(" (rank %lld)", static_cast<long long>(where));
}

} // namespace

std::string draw_timeline(const schedule_report& x,
                          const timeline_options& options) {
  auto num_rows = rows_of(x, options);
  std::vector<cell_row> rows(num_rows, cell_row{options.width, x.makespan});
  for (auto& y : x.timeline)
    if (y.device < num_rows)
      rows[y.device].add(y);
  std::string result;
  for (size_t i = 0; i < num_rows; ++i)
    result += format("%4zu  ", i) + rows[i].text(options.colour)
              + format("  keeps %llu\n",
                       static_cast<unsigned long long>(x.peak_live[i]));
  if (num_rows < x.busy.size())
    result += format("  and %zu more devices\n", x.busy.size() - num_rows);
  return result
         + "      digits: forward, letters: backward (a is 0), dots: idle\n"
         + summary(x) + "\n";
}

std::string schedule_summary(const schedule_report& x, std::string_view name,
                             uint64_t microbatches) {
  constexpr size_t many = 8;
  auto result = "schedule: " + std::string{name} + ", "
                + std::to_string(microbatches)
                + (microbatches == 1 ? " microbatch" : " microbatches")
                + format(", predicted bubble %.1f %%", 100 * x.bubble);
  auto& live = x.peak_live;
  if (live.size() > many) {
    auto most = std::max_element(live.begin(), live.end());
    return result + ", live at most " + std::to_string(*most) + " (rank "
           + std::to_string(most - live.begin()) + ")\n";
  }
  result += ", live by rank";
  for (auto n : live)
    result += " " + std::to_string(n);
  return result + "\n";
}

std::string timeline_svg(const schedule_report& x,
                         const timeline_options& options) {
  constexpr size_t left = 40;
  constexpr size_t row = 22;
  auto num_rows = rows_of(x, options);
  auto width = 10 * options.width;
  auto height = row * (num_rows + 1);
  auto scale = x.makespan > 0 ? double(width) / x.makespan : 0;
  auto result = format(
    "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%zu\""
    " height=\"%zu\" font-family=\"sans-serif\""
    " font-size=\"11\">\n",
    left + width, height);
  for (size_t i = 0; i < num_rows; ++i)
    result += format(
      "<text x=\"4\" y=\"%zu\">%zu</text>"
      "<rect x=\"%zu\" y=\"%zu\" width=\"%zu\" height=\"%zu\""
      " fill=\"#eeeeee\"/>\n",
      i * row + 15, i, left, i * row + 1, width, row - 2);
  for (auto& y : x.timeline) {
    if (y.device >= num_rows)
      continue;
    auto forward = y.what.what == phase::forward;
    auto microbatch = static_cast<unsigned long long>(y.what.microbatch.value);
    auto begin = double(left) + y.begin * scale;
    auto size = (y.end - y.begin) * scale;
    result += format(
                "<rect x=\"%.2f\" y=\"%zu\" width=\"%.2f\" height=\"%zu\""
                " fill=\"%s\" stroke=\"white\" stroke-width=\"0.5\">",
                begin, y.device * row + 1, size, row - 2,
                forward ? "#7fb2e5" : "#f2b266")
              + format(
                "<title>microbatch %llu, %s, %.4g s to %.4g s</title>"
                "</rect>",
                microbatch, forward ? "forward" : "backward", y.begin, y.end);
    if (size >= 12)
      result += format(
        "<text x=\"%.2f\" y=\"%zu\" text-anchor=\"middle\">%llu"
        "</text>",
        begin + size / 2, y.device * row + 15, microbatch);
    result += '\n';
  }
  return result
         + format("<text x=\"%zu\" y=\"%zu\">", left, num_rows * row + 15)
         + summary(x) + "</text>\n</svg>\n";
}

} // namespace smp
