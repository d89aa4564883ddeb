#include "transport/collectives/elements.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <type_traits>

namespace smp {

namespace {

// -- 16-bit floating point ----------------------------------------------------
// Without branches, so that the loops below become vector instructions.

struct half {
  uint16_t bits;
};

struct brain_half {
  uint16_t bits;
};

/// A conditional expression would become a branch.
[[gnu::always_inline]] inline uint32_t choose(bool which, uint32_t x,
                                              uint32_t y) {
  auto mask = 0u - static_cast<uint32_t>(which);
  return (x & mask) | (y & ~mask);
}

[[gnu::always_inline]] inline float widen(half x) {
  constexpr uint32_t exponent = 0x7c00u << 13;
  uint32_t magnitude = (x.bits & 0x7fffu) << 13;
  uint32_t normal = magnitude + ((127u - 15u) << 23);
  // Infinity or NaN: the exponent is all ones here, too.
  uint32_t special = normal + ((128u - 16u) << 23);
  // Subnormal: the subtraction shifts it.
  float tiny = std::bit_cast<float>(normal + (1u << 23))
               - std::bit_cast<float>(113u << 23);
  uint32_t found = magnitude & exponent;
  auto result = choose(found == exponent, special, normal);
  result = choose(found == 0, std::bit_cast<uint32_t>(tiny), result);
  return std::bit_cast<float>(result | (x.bits & 0x8000u) << 16);
}

[[gnu::always_inline]] inline float widen(brain_half x) {
  return std::bit_cast<float>(uint32_t{x.bits} << 16);
}

/// Rounds to the nearest, ties to even.
[[gnu::always_inline]] inline half narrow_to_half(float x) {
  constexpr uint32_t shift = ((127u - 15u) + (23u - 10u) + 1u) << 23;
  auto bits = std::bit_cast<uint32_t>(x);
  uint32_t sign = bits & 0x80000000u;
  bits ^= sign;
  auto special = choose(bits > (255u << 23), 0x7e00u, 0x7c00u);
  // The addition rounds subnormal numbers.
  uint32_t tiny = std::bit_cast<uint32_t>(std::bit_cast<float>(bits)
                                          + std::bit_cast<float>(shift))
                  - shift;
  uint32_t normal = (bits + ((15u - 127u) << 23) + 0xfffu + (bits >> 13 & 1u))
                    >> 13;
  auto result = choose(bits >= ((127u + 16u) << 23), special, normal);
  result = choose(bits < (113u << 23), tiny, result);
  return {static_cast<uint16_t>(result | sign >> 16)};
}

[[gnu::always_inline]] inline brain_half narrow_to_brain_half(float x) {
  auto bits = std::bit_cast<uint32_t>(x);
  uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  return {static_cast<uint16_t>(is_nan ? 0x7fc0u : rounded)};
}

// -- one pass -----------------------------------------------------------------

/// The type in which elements of type `T` are summed. Integers wrap around.
template <class T>
struct summed_in
  : std::conditional<std::is_integral_v<T>, std::make_unsigned<T>,
                     std::type_identity<T>>::type {};
template <>
struct summed_in<half> : std::type_identity<float> {};
template <>
struct summed_in<brain_half> : std::type_identity<float> {};

/// Elements that stay in the nearest cache.
constexpr uint64_t tile = 1024;

template <class T, reduce_op Op>
struct pass {
  using sum = std::conditional_t<Op == reduce_op::max && std::is_integral_v<T>,
                                 T, typename summed_in<T>::type>;

  [[gnu::always_inline]] static sum load(T x) {
    if constexpr (std::is_class_v<T>)
      return widen(x);
    else
      return static_cast<sum>(x);
  }

  [[gnu::always_inline]] static T store(sum x) {
    if constexpr (std::is_same_v<T, half>)
      return narrow_to_half(x);
    else if constexpr (std::is_same_v<T, brain_half>)
      return narrow_to_brain_half(x);
    else
      return static_cast<T>(x);
  }

  [[gnu::always_inline]] static sum add(sum x, sum y) {
    if constexpr (Op != reduce_op::max)
      return static_cast<sum>(x + y);
    else if constexpr (std::is_integral_v<sum>)
      return x > y ? x : y;
    else
      return y > x || y != y ? y : x;
  }

  [[gnu::always_inline]] static void run(void* output,
                                         std::span<const void* const> inputs,
                                         uint64_t count, uint64_t divisor) {
    sum sums[tile];
    for (uint64_t begin = 0; begin < count; begin += tile) {
      auto n = std::min(tile, count - begin);
      auto first = static_cast<const T*>(inputs[0]) + begin;
      for (uint64_t i = 0; i < n; ++i)
        sums[i] = load(first[i]);
      for (size_t j = 1; j < inputs.size(); ++j) {
        auto next = static_cast<const T*>(inputs[j]) + begin;
        for (uint64_t i = 0; i < n; ++i)
          sums[i] = add(sums[i], load(next[i]));
      }
      if constexpr (Op == reduce_op::mean)
        for (uint64_t i = 0; i < n; ++i)
          sums[i] /= static_cast<sum>(divisor);
      auto to = static_cast<T*>(output) + begin;
      for (uint64_t i = 0; i < n; ++i)
        to[i] = store(sums[i]);
    }
  }

  // Without fused multiplications: the bits must be the same on any machine.
  [[gnu::optimize("O3"), gnu::target("avx2")]] static void
  run_wide(void* output, std::span<const void* const> inputs, uint64_t count,
           uint64_t divisor) {
    run(output, inputs, count, divisor);
  }

  [[gnu::optimize("O3")]] static void
  run_plain(void* output, std::span<const void* const> inputs, uint64_t count,
            uint64_t divisor) {
    run(output, inputs, count, divisor);
  }
};

bool has_wide_vectors() {
  static const bool result = __builtin_cpu_supports("avx2") != 0;
  return result;
}

template <class T>
void combine_all(reduce_op op, void* output,
                 std::span<const void* const> inputs, uint64_t count,
                 std::optional<uint64_t> divisor) {
  auto run = [&]<reduce_op Op>() {
    auto f = has_wide_vectors() ? pass<T, Op>::run_wide
                                : pass<T, Op>::run_plain;
    f(output, inputs, count, divisor.value_or(1));
  };
  if (op == reduce_op::max)
    return run.template operator()<reduce_op::max>();
  if constexpr (!std::is_integral_v<T>)
    if (op == reduce_op::mean && divisor)
      return run.template operator()<reduce_op::mean>();
  run.template operator()<reduce_op::sum>();
}

} // namespace

// -- types --------------------------------------------------------------------

const char* to_string(element_type x) noexcept {
  constexpr const char* names[] = {
    "uint8",    "int8",    "int16",   "int32", "int64",     "float16",
    "bfloat16", "float32", "float64", "bool",  "complex64", "complex128"};
  return names[static_cast<size_t>(x)];
}

uint64_t size_of(element_type x) noexcept {
  constexpr uint64_t sizes[] = {1, 1, 2, 4, 8, 2, 2, 4, 8, 1, 8, 16};
  return sizes[static_cast<size_t>(x)];
}

const char* to_string(reduce_op x) noexcept {
  constexpr const char* names[] = {"sum", "mean", "max"};
  return names[static_cast<size_t>(x)];
}

bool can_reduce(element_type type, reduce_op op) noexcept {
  if (type > element_type::float64)
    return false;
  return op != reduce_op::mean || type >= element_type::float16;
}

void combine(element_type type, reduce_op op, void* output,
             std::span<const void* const> inputs, uint64_t count,
             std::optional<uint64_t> divisor) {
  switch (type) {
    case element_type::uint8:
      return combine_all<uint8_t>(op, output, inputs, count, divisor);
    case element_type::int8:
      return combine_all<int8_t>(op, output, inputs, count, divisor);
    case element_type::int16:
      return combine_all<int16_t>(op, output, inputs, count, divisor);
    case element_type::int32:
      return combine_all<int32_t>(op, output, inputs, count, divisor);
    case element_type::int64:
      return combine_all<int64_t>(op, output, inputs, count, divisor);
    case element_type::float16:
      return combine_all<half>(op, output, inputs, count, divisor);
    case element_type::bfloat16:
      return combine_all<brain_half>(op, output, inputs, count, divisor);
    case element_type::float32:
      return combine_all<float>(op, output, inputs, count, divisor);
    case element_type::float64:
      return combine_all<double>(op, output, inputs, count, divisor);
    default:
      return; // see can_reduce
  }
}

} // namespace smp
