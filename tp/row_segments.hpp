#pragma once

// Rows of large linears, some of which travel while others are multiplied.

#include "tp/tensor_group.hpp"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace smp::nn {

/// Rows of a linear that travel together.
struct row_segment {
  size_t linear;
  int64_t begin;
  int64_t length;
};

/// The number of segments in which the rows of a result travel: several, if
/// none gets small.
inline int64_t segment_count(int64_t rows, int64_t bytes) {
  constexpr int64_t least = 4 << 20, most = 4;
  return std::clamp(bytes / least, int64_t{1},
                    std::clamp(rows, int64_t{1}, most));
}

/// @param counts by linear
inline std::vector<row_segment> segments_of(const std::vector<int64_t>& counts,
                                            int64_t rows) {
  std::vector<row_segment> result;
  for (size_t i = 0; i < counts.size(); ++i)
    for (int64_t k = 0, n = counts[i]; k < n; ++k)
      result.push_back({i, k * rows / n, (k + 1) * rows / n - k * rows / n});
  return result;
}

/// Begins each before it waits for the previous one: two are in flight.
template <class Begin, class End>
void overlap(const std::vector<row_segment>& xs, Begin begin, End end) {
  tensor_group::pending last;
  for (size_t i = 0; i < xs.size(); ++i) {
    auto next = begin(i);
    if (last)
      end(xs[i - 1], last());
    last = std::move(next);
  }
  if (last)
    end(xs.back(), last());
}

/// The same for rows that arrive first: the next arrive while these are used.
template <class Come, class Begin, class End>
void overlap(const std::vector<row_segment>& xs, Come come, Begin begin,
             End end) {
  tensor_group::pending next = come(0);
  overlap(
    xs,
    [&](size_t i) {
      auto now = std::move(next);
      next = i + 1 < xs.size() ? come(i + 1) : tensor_group::pending{};
      return begin(i, now());
    },
    end);
}

/// Copies [..., length, n] to its place in [..., rows, n], which it allocates.
inline void put_segment(at::Tensor& to, const row_segment& s, int64_t rows,
                        const at::Tensor& part) {
  if (s.length == rows) {
    to = part;
    return;
  }
  auto axis = part.dim() - 2;
  if (!to.defined()) {
    auto sizes = part.sizes().vec();
    sizes[static_cast<size_t>(axis)] = rows;
    to = at::empty(sizes, part.options());
  }
  to.narrow(axis, s.begin, s.length).copy_(part);
}

} // namespace smp::nn
