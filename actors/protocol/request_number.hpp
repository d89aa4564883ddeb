#pragma once

// Numbers of requests. They restart in each step, so that in a static flow a
// request has the same number in every step (R33).
//
// Bit 63: the step body of a microbatch. Bit 62: reserved. Bits 32 to 61: the
// step. Bit 31: a promise; promises are counted separately. Bits 0 to 30: the
// microbatch, or how many requests its origin sent before it in the step.

#include "transport/ids.hpp"

namespace smp {

constexpr uint64_t root_request_bit = uint64_t{1} << 63;
constexpr uint64_t step_bits = uint64_t{0x3fff'ffff} << 32;

constexpr uint64_t request_number(step_id step, uint32_t call) {
  return (step.value << 32 & step_bits) | call;
}

constexpr uint32_t promise_bit = uint32_t{1} << 31;

constexpr uint64_t promise_number(step_id step, uint32_t call) {
  return request_number(step, promise_bit | call);
}

/// Root requests never collide with those of the MODULE SERVER.
constexpr uint64_t root_request_number(step_id step, microbatch_id x) {
  return root_request_bit
         | request_number(step, static_cast<uint32_t>(x.value));
}

constexpr bool is_root_request(request_id x) {
  return (x.number & root_request_bit) != 0;
}

constexpr uint32_t call_number(request_id x) {
  return static_cast<uint32_t>(x.number);
}

constexpr step_id step_of(request_id x) {
  return step_id{(x.number & step_bits) >> 32};
}

/// @returns the number that `x` would have in step 0: its name in every step.
constexpr request_id without_step(request_id x) {
  return {x.origin, x.number & ~step_bits};
}

} // namespace smp
