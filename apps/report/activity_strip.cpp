#include "apps/report/activity_strip.hpp"

#include <algorithm>
#include <array>

namespace smp::app {

namespace {

using slice_kind = flight_slice::kind;

/// @param optimizer the name of that activity
strip_cell cell_of(const flight_slice& x, uint32_t optimizer) {
  switch (x.what) {
    case slice_kind::executing:
      return x.in == phase::forward ? strip_cell::forward
                                    : strip_cell::backward;
    case slice_kind::activity:
      return x.name == optimizer ? strip_cell::optimizer : strip_cell::wait;
    case slice_kind::transfer:
    case slice_kind::collective:
      return strip_cell::communication;
    case slice_kind::waiting:
      return strip_cell::wait;
    case slice_kind::step:
    case slice_kind::execution:
    case slice_kind::module:
      break;
  }
  return strip_cell::idle;
}

using times = std::array<double, strip_cells>;

/// What is rarer or tells less counts only in time that nothing else took.
strip_cell most_of(const times& x) {
  auto at = [&x](strip_cell y) { return x[static_cast<size_t>(y)]; };
  auto busy = strip_cell::forward;
  if (at(strip_cell::backward) > at(busy))
    busy = strip_cell::backward;
  if (at(strip_cell::optimizer) > at(busy))
    busy = strip_cell::optimizer;
  if (at(busy) >= 0.5)
    return busy;
  for (auto y : {strip_cell::communication, strip_cell::wait})
    if (at(y) >= 0.5)
      return y;
  return at(busy) >= 0.25 ? busy : strip_cell::idle;
}

} // namespace

char letter_of(strip_cell x) noexcept {
  constexpr std::string_view letters = " .coBF";
  return letters[static_cast<size_t>(x)];
}

std::string_view name_of(strip_cell x) noexcept {
  constexpr std::array<std::string_view, strip_cells> names{
    "idle", "wait", "communication", "optimizer", "backward", "forward"};
  return names[static_cast<size_t>(x)];
}

std::vector<strip_cell> strip_of(const flight_timeline& x, uint32_t optimizer,
                                 int64_t begin, int64_t end, size_t cells) {
  std::vector<times> sums(cells, times{});
  if (cells == 0 || end <= begin)
    return {};
  const auto width = static_cast<double>(end - begin)
                     / static_cast<double>(cells);
  for (auto& y : x.slices) {
    auto what = cell_of(y, optimizer);
    if (what == strip_cell::idle || y.end < begin || y.begin > end)
      continue;
    auto from = static_cast<double>(std::max(y.begin, begin) - begin) / width;
    auto to = static_cast<double>(std::min(y.end, end) - begin) / width;
    for (auto i = static_cast<size_t>(from); i < cells; ++i) {
      auto cell = static_cast<double>(i);
      if (cell >= to)
        break;
      sums[i][static_cast<size_t>(what)] += std::min(to, cell + 1)
                                            - std::max(from, cell);
    }
  }
  std::vector<strip_cell> result(cells);
  std::ranges::transform(sums, result.begin(), most_of);
  return result;
}

} // namespace smp::app
