#include "runtime/base/nearest_name.hpp"

#include <algorithm>
#include <vector>

namespace smp {

std::string folded_name(std::string_view x) {
  std::string result;
  for (char c : x)
    if (c != '_' && c != '-')
      result += c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
  return result;
}

size_t typing_distance(std::string_view x, std::string_view y) {
  std::vector<size_t> before(y.size() + 1);
  std::vector<size_t> last(y.size() + 1);
  std::vector<size_t> row(y.size() + 1);
  for (size_t j = 0; j <= y.size(); ++j)
    last[j] = j;
  for (size_t i = 1; i <= x.size(); ++i) {
    row[0] = i;
    for (size_t j = 1; j <= y.size(); ++j) {
      row[j] = std::min({last[j] + 1, row[j - 1] + 1,
                         last[j - 1] + (x[i - 1] == y[j - 1] ? 0 : 1)});
      if (i > 1 && j > 1 && x[i - 1] == y[j - 2] && x[i - 2] == y[j - 1])
        row[j] = std::min(row[j], before[j - 2] + 1);
    }
    before.swap(last);
    last.swap(row);
  }
  return last[y.size()];
}

size_t typing_tolerance(std::string_view x) {
  return std::max<size_t>(1, x.size() / 3);
}

std::string_view nearest_name(std::string_view x,
                              std::span<const std::string_view> names) {
  auto best = typing_tolerance(x) + 1;
  std::string_view result;
  for (auto name : names)
    if (auto d = typing_distance(folded_name(x), folded_name(name)); d < best) {
      best = d;
      result = name;
    }
  return result;
}

} // namespace smp
