#include "tests/support/catch.hpp"

#include "transport/collectives/elements.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

using namespace smp;

namespace {

/// The value of float16 bits, from its definition.
double value_of_half(uint16_t x) {
  auto sign = x >> 15 != 0 ? -1.0 : 1.0;
  auto exponent = x >> 10 & 31;
  auto fraction = (x & 1023) / 1024.0;
  if (exponent == 31)
    return fraction != 0 ? std::nan("") : sign * INFINITY;
  return sign
         * (exponent == 0 ? std::ldexp(fraction, -14)
                          : std::ldexp(1 + fraction, exponent - 15));
}

double value_of_brain(uint16_t x) {
  return std::bit_cast<float>(uint32_t{x} << 16);
}

/// @returns whether no 16-bit number is nearer to `wanted` than `x`, and of two
/// as near it is the even one.
template <class F>
bool is_nearest(uint16_t x, double wanted, F value) {
  auto off = std::abs(value(x) - wanted);
  for (int step : {-1, 1}) {
    auto other = static_cast<uint16_t>(x + step);
    auto theirs = std::abs(value(other) - wanted);
    if (theirs < off || (theirs == off && (x & 1) != 0))
      return false;
  }
  return true;
}

template <class T>
std::vector<T> combined(element_type type, reduce_op op,
                        const std::vector<std::vector<T>>& xs,
                        std::optional<uint64_t> divisor = {}) {
  std::vector<T> result(xs[0].size());
  std::vector<const void*> inputs;
  for (auto& x : xs)
    inputs.push_back(x.data());
  combine(type, op, result.data(), inputs, result.size(), divisor);
  return result;
}

template <class T>
void check_numbers(element_type type) {
  std::mt19937 rng{7};
  // Around the tiles in which sums are made.
  for (size_t count : {0, 1, 7, 1023, 1024, 1025, 3000}) {
    std::vector<std::vector<T>> xs(5, std::vector<T>(count));
    for (auto& x : xs)
      for (auto& y : x)
        y = static_cast<T>(static_cast<int>(rng() % 1000) - 500);
    std::vector<T> sum(count);
    std::vector<T> max(count);
    for (size_t i = 0; i < count; ++i) {
      sum[i] = max[i] = xs[0][i];
      for (size_t j = 1; j < xs.size(); ++j) {
        sum[i] = static_cast<T>(sum[i] + xs[j][i]);
        max[i] = std::max(max[i], xs[j][i]);
      }
    }
    CHECK(combined(type, reduce_op::sum, xs) == sum);
    CHECK(combined(type, reduce_op::max, xs) == max);
  }
}

/// Of many sizes, so that most of it is lost where two are added.
template <class T>
T mixed_number(std::mt19937& rng) {
  auto x = static_cast<T>(rng()) - static_cast<T>(1u << 31);
  return std::ldexp(x, static_cast<int>(rng() % 40) - 50);
}

template <class T>
void check_order(element_type type) {
  std::mt19937 rng{13};
  constexpr size_t count = 3001; // also what fills no vector
  std::vector<std::vector<T>> xs(5, std::vector<T>(count));
  for (auto& x : xs)
    for (auto& y : x)
      y = mixed_number<T>(rng);
  std::vector<T> sum(count);
  std::vector<T> mean(count);
  for (size_t i = 0; i < count; ++i) {
    sum[i] = xs[0][i];
    for (size_t j = 1; j < xs.size(); ++j)
      sum[i] += xs[j][i];
    mean[i] = sum[i] / T{5};
  }
  CHECK(combined(type, reduce_op::sum, xs) == sum);
  CHECK(combined(type, reduce_op::mean, xs, 5) == mean);
  // Else this shows nothing.
  std::reverse(xs.begin(), xs.end());
  CHECK(combined(type, reduce_op::sum, xs) != sum);
}

} // namespace

TEST_CASE("numbers of every type are added and compared",
          "[transport][elements]") {
  check_numbers<uint8_t>(element_type::uint8);
  check_numbers<int8_t>(element_type::int8);
  check_numbers<int16_t>(element_type::int16);
  check_numbers<int32_t>(element_type::int32);
  check_numbers<int64_t>(element_type::int64);
  check_numbers<float>(element_type::float32);
  check_numbers<double>(element_type::float64);
}

TEST_CASE("sums and means have the bits of adding one after the other",
          "[transport][elements][R30]") {
  check_order<float>(element_type::float32);
  check_order<double>(element_type::float64);
}

TEST_CASE("every bfloat16 is read and written as it is",
          "[transport][elements]") {
  std::vector<uint16_t> all(65536);
  for (size_t i = 0; i < all.size(); ++i)
    all[i] = static_cast<uint16_t>(i);
  auto same = combined<uint16_t>(element_type::bfloat16, reduce_op::max, {all});
  auto doubled = combined<uint16_t>(element_type::bfloat16, reduce_op::sum,
                                    {all, all});
  size_t wrong = 0;
  for (size_t i = 0; i < all.size(); ++i) {
    auto value = value_of_brain(all[i]);
    if (std::isnan(value)) {
      wrong += !std::isnan(value_of_brain(same[i]));
      wrong += !std::isnan(value_of_brain(doubled[i]));
      continue;
    }
    wrong += same[i] != all[i];
    auto twice = 2 * value;
    auto is_too_large = std::abs(twice) > std::numeric_limits<float>::max();
    wrong += is_too_large ? !std::isinf(value_of_brain(doubled[i]))
                          : value_of_brain(doubled[i]) != twice;
  }
  CHECK(wrong == 0);
}

TEST_CASE("every float16 is read and written as it is",
          "[transport][elements]") {
  std::vector<uint16_t> all(65536);
  for (size_t i = 0; i < all.size(); ++i)
    all[i] = static_cast<uint16_t>(i);
  auto same = combined<uint16_t>(element_type::float16, reduce_op::max, {all});
  auto doubled = combined<uint16_t>(element_type::float16, reduce_op::sum,
                                    {all, all});
  size_t wrong = 0;
  for (size_t i = 0; i < all.size(); ++i) {
    auto value = value_of_half(all[i]);
    if (std::isnan(value)) {
      wrong += !std::isnan(value_of_half(same[i]));
      continue;
    }
    wrong += same[i] != all[i];
    auto twice = 2 * value;
    wrong += std::abs(twice) >= 65520 ? !std::isinf(value_of_half(doubled[i]))
                                      : value_of_half(doubled[i]) != twice;
  }
  CHECK(wrong == 0);
}

TEST_CASE("16-bit sums are made in float32 and rounded once",
          "[transport][elements]") {
  std::mt19937 rng{11};
  for (bool brain : {false, true}) {
    auto type = brain ? element_type::bfloat16 : element_type::float16;
    auto value = brain ? value_of_brain : value_of_half;
    std::vector<std::vector<uint16_t>> xs(4, std::vector<uint16_t>(5000));
    for (auto& x : xs)
      for (auto& y : x) {
        // Of middle size, so that nothing overflows.
        auto exponent = brain ? 100 + rng() % 50 : 8 + rng() % 12;
        auto bits = brain ? 7 : 10;
        y = static_cast<uint16_t>((rng() & 1) << 15 | exponent << bits
                                  | rng() % (1u << bits));
      }
    auto sums = combined(type, reduce_op::sum, xs);
    auto means = combined(type, reduce_op::mean, xs, 4);
    size_t wrong = 0;
    for (size_t i = 0; i < sums.size(); ++i) {
      float sum = 0;
      for (auto& x : xs)
        sum += static_cast<float>(value(x[i]));
      wrong += !is_nearest(sums[i], sum, value);
      wrong += !is_nearest(means[i], sum / 4, value);
    }
    CHECK(wrong == 0);
  }
}

TEST_CASE("a mean divides once, a maximum keeps NaN", "[transport][elements]") {
  std::vector<std::vector<float>> xs{{1, 5, -1}, {2, 5, -2}, {4, 5, -3}};
  CHECK(combined(element_type::float32, reduce_op::mean, xs, 3)
        == std::vector<float>{7.0f / 3.0f, 5, -2});
  auto nan = std::numeric_limits<float>::quiet_NaN();
  for (size_t where = 0; where < 3; ++where) {
    auto ys = xs;
    ys[where][1] = nan;
    auto max = combined(element_type::float32, reduce_op::max, ys);
    CHECK(max[0] == 4);
    CHECK(std::isnan(max[1]));
    CHECK(max[2] == -1);
  }
  CHECK(can_reduce(element_type::bfloat16, reduce_op::mean));
  CHECK_FALSE(can_reduce(element_type::int32, reduce_op::mean));
  CHECK_FALSE(can_reduce(element_type::boolean, reduce_op::max));
  CHECK_FALSE(can_reduce(element_type::complex64, reduce_op::sum));
}

TEST_CASE("the output of a sum may be one of its inputs",
          "[transport][elements]") {
  std::vector<double> x(3000, 1.5);
  std::vector<double> y(3000, 2.0);
  const void* inputs[] = {x.data(), y.data(), x.data()};
  combine(element_type::float64, reduce_op::sum, y.data(), inputs, y.size());
  CHECK(y == std::vector<double>(3000, 5.0));
}
