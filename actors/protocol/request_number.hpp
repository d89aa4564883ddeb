#pragma once

// How requests are numbered: anew in each step, so that in a flow that does not
// change a request has the same number in every step (R33).
//
// bit 63: the step body of a microbatch; bit 62: free for other kinds; bits 32
// to 61: the step; below: the microbatch, or how many requests its origin sent
// before it in the step; bit 31: a promise; those are numbered apart.

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

/// Root requests never meet those of the MODULE SERVER.
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

/// @returns what `x` would be called in step 0: its name in every step.
constexpr request_id without_step(request_id x) {
  return {x.origin, x.number & ~step_bits};
}

} // namespace smp
