#pragma once

// The random choices of data sources: functions of (seed, stream) alone.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

namespace smp {

/// Streams of training steps and of held-out batches never meet.
constexpr uint64_t held_out_streams = uint64_t{1} << 63;

/// Numbers of one batch. The engine is one whose results the standard fixes;
/// its distributions are not, hence `below`.
class batch_numbers {
public:
  /// @param stream the training step, or `held_out_streams` + index
  batch_numbers(uint64_t seed, uint64_t stream) {
    auto low = [](uint64_t x) { return static_cast<uint32_t>(x); };
    std::seed_seq seq{low(seed), low(seed >> 32), low(stream),
                      low(stream >> 32)};
    engine_.seed(seq);
  }

  /// Evenly in [0, n).
  uint64_t below(uint64_t n) {
    return static_cast<uint64_t>((static_cast<unsigned __int128>(engine_()) * n)
                                 >> 64);
  }

  /// Evenly in [-1, 1).
  double between_ones() {
    return static_cast<double>(engine_() >> 11) * 0x1p-52 - 1;
  }

private:
  std::mt19937_64 engine_;
};

/// @returns where the `n` sequences of training step `step` begin, each evenly
/// in [0, choices).
inline std::vector<uint64_t> random_begins(uint64_t seed, uint64_t step,
                                           uint64_t n, uint64_t choices) {
  batch_numbers numbers{seed, step};
  std::vector<uint64_t> result(n);
  for (auto& x : result)
    x = numbers.below(choices);
  return result;
}

/// @returns part `index` of `count` equal ones
inline std::vector<uint64_t> part_of(const std::vector<uint64_t>& begins,
                                     uint64_t index, uint64_t count) {
  auto n = static_cast<std::ptrdiff_t>(begins.size() / count);
  auto first = begins.begin() + static_cast<std::ptrdiff_t>(index) * n;
  return {first, first + n};
}

/// @returns where the `n` sequences of held-out batch `index` of `count`
/// begin: all of them together spaced evenly over [0, last].
inline std::vector<uint64_t> even_begins(uint64_t index, uint64_t count,
                                         uint64_t n, uint64_t last) {
  const auto gaps = std::max<uint64_t>(count * n - 1, 1);
  std::vector<uint64_t> result(n);
  for (uint64_t i = 0; i < n; ++i)
    result[i] = (index * n + i) * last / gaps;
  return result;
}

} // namespace smp
