#pragma once

// The random choices of data sources: functions of (seed, stream) alone.

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <random>
#include <utility>
#include <vector>

namespace smp {

/// Keeps the streams of held-out batches apart from those of training steps.
constexpr uint64_t held_out_streams = uint64_t{1} << 63;

/// Random numbers of one batch. The standard fixes the results of the engine
/// but not those of its distributions, hence `below`.
class batch_numbers {
public:
  /// @param stream the training step, or `held_out_streams` + index
  batch_numbers(uint64_t seed, uint64_t stream) {
    auto low = [](uint64_t x) { return static_cast<uint32_t>(x); };
    std::seed_seq seq{low(seed), low(seed >> 32), low(stream),
                      low(stream >> 32)};
    engine_.seed(seq);
  }

  /// Uniform in [0, n).
  uint64_t below(uint64_t n) {
    return static_cast<uint64_t>((static_cast<unsigned __int128>(engine_()) * n)
                                 >> 64);
  }

  /// Uniform in [-1, 1).
  double between_ones() {
    return static_cast<double>(engine_() >> 11) * 0x1p-52 - 1;
  }

private:
  std::mt19937_64 engine_;
};

/// @returns where the `n` sequences of training step `step` begin, each uniform
/// in [0, choices).
inline std::vector<uint64_t> random_begins(uint64_t seed, uint64_t step,
                                           uint64_t n, uint64_t choices) {
  batch_numbers numbers{seed, step};
  std::vector<uint64_t> result(n);
  for (auto& x : result)
    x = numbers.below(choices);
  return result;
}

/// A permutation of 0 to n - 1. It may be too large for memory, and a run may
/// resume anywhere, so each place is computed by itself: a Feistel network
/// permutes the numbers below a power of four and is applied again while the
/// result is not below n.
class shuffled_order {
public:
  /// @param pass number of the pass over all of them, from 0: fixes its order
  /// @param n from 1 to 2^62
  shuffled_order(uint64_t seed, uint64_t pass, uint64_t n) : n_(n) {
    batch_numbers numbers{seed, pass};
    for (auto& key : keys_)
      key = numbers.below(std::numeric_limits<uint64_t>::max());
    while ((uint64_t{1} << (2 * half_)) < n)
      ++half_;
  }

  /// @returns the number at `place`; both are below n.
  uint64_t at(uint64_t place) const {
    do
      place = permuted(place);
    while (place >= n_);
    return place;
  }

private:
  uint64_t permuted(uint64_t x) const {
    auto left = x >> half_;
    auto right = x & ((uint64_t{1} << half_) - 1);
    for (auto key : keys_)
      left = std::exchange(right, left ^ (mixed(right ^ key) >> (64 - half_)));
    return (left << half_) | right;
  }

  /// The output function of SplitMix64.
  static uint64_t mixed(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
    x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
    return x ^ (x >> 31);
  }

  uint64_t n_;
  /// Bits of a half; at least 4, as few numbers would have few orders.
  uint64_t half_ = 4;
  std::array<uint64_t, 8> keys_ = {};
};

/// @returns which of `choices` samples training takes at the `n` positions from
/// `first` on: each pass takes all of them, in an order of its own.
inline std::vector<uint64_t> shuffled_rows(uint64_t seed, uint64_t first,
                                           uint64_t n, uint64_t choices) {
  std::vector<uint64_t> result(n);
  std::optional<shuffled_order> order;
  for (auto& x : result) {
    if (!order || first % choices == 0)
      order.emplace(seed, first / choices, choices);
    x = order->at(first++ % choices);
  }
  return result;
}

/// @returns how many of `size` bytes, tokens or samples are for training; the
/// rest, at the end, is held out
inline uint64_t training_size(uint64_t size, double held_out) {
  return static_cast<uint64_t>(static_cast<double>(size) * (1 - held_out));
}

/// @returns part `index` of `count` equal ones
inline std::vector<uint64_t> part_of(const std::vector<uint64_t>& begins,
                                     uint64_t index, uint64_t count) {
  auto n = static_cast<std::ptrdiff_t>(begins.size() / count);
  auto first = begins.begin() + static_cast<std::ptrdiff_t>(index) * n;
  return {first, first + n};
}

/// @returns where the `n` sequences of held-out batch `index` of `count` begin:
/// those of all batches are spaced evenly over [0, last].
inline std::vector<uint64_t> even_begins(uint64_t index, uint64_t count,
                                         uint64_t n, uint64_t last) {
  const auto gaps = std::max<uint64_t>(count * n - 1, 1);
  std::vector<uint64_t> result(n);
  for (uint64_t i = 0; i < n; ++i)
    result[i] = (index * n + i) * last / gaps;
  return result;
}

/// @returns which of `choices` samples held-out batch `index` of `count` has:
/// those of all batches are spaced evenly, each as often as any other or
/// once more.
inline std::vector<uint64_t> even_rows(uint64_t index, uint64_t count,
                                       uint64_t n, uint64_t choices) {
  std::vector<uint64_t> result(n);
  for (uint64_t i = 0; i < n; ++i)
    result[i] = (index * n + i) * choices / (count * n);
  return result;
}

} // namespace smp
