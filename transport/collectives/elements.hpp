#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

namespace smp {

/// The element type of a tensor, for sums and for errors.
enum class element_type : uint8_t {
  uint8,
  int8,
  int16,
  int32,
  int64,
  float16,
  bfloat16,
  float32,
  float64,
  boolean,
  complex64,
  complex128,
};

constexpr element_type last_of(element_type) noexcept {
  return element_type::complex128;
}

/// @returns the name as tensor libraries write it: "float32".
const char* to_string(element_type x) noexcept;

/// In bytes.
uint64_t size_of(element_type x) noexcept;

/// How the tensors of several ranks are combined into one.
enum class reduce_op : uint8_t {
  sum,
  mean, // of floating point numbers
  max,  // NaN if any is
};

constexpr reduce_op last_of(reduce_op) noexcept {
  return reduce_op::max;
}

const char* to_string(reduce_op x) noexcept;

/// @returns whether `combine` supports this.
bool can_reduce(element_type type, reduce_op op) noexcept;

/// Combines `inputs` element by element, in their order and in one pass, into
/// `output`, which may be one of them. float16 and bfloat16 are summed in
/// float32 and rounded once. The bits depend on nothing but the inputs and
/// their order.
/// @param count elements in each
/// @param divisor of the sum, for a mean
/// @pre `can_reduce(type, op)`, and `inputs` is not empty
void combine(element_type type, reduce_op op, void* output,
             std::span<const void* const> inputs, uint64_t count,
             std::optional<uint64_t> divisor = {});

} // namespace smp
