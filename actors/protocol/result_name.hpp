#pragma once

// How the results of a promised request are called before they exist (R38): by
// the request and their position in its answer. So a name is the same in every
// step of a flow that does not change, but for the step, which travels with the
// request that names it and not with the name.
//
// bit 63: a name, no object that `object_store::hold` numbered; bits 40 to 62:
// the rank that asked; bits 12 to 39: how many promises it sent before in the
// step; below: the position.

#include "actors/protocol/request_number.hpp"

#include <cstddef>

namespace smp {

constexpr uint64_t name_bit = uint64_t{1} << 63;
constexpr int asker_shift = 40;
constexpr int promise_shift = 12;
constexpr uint64_t slot_bits = (uint64_t{1} << asker_shift) - 1;

/// A request with more results cannot be promised.
constexpr size_t max_named_results = size_t{1} << promise_shift;

constexpr bool is_result_name(object_id x) noexcept {
  return (x.number & name_bit) != 0;
}

/// What a result of `step` has for its generation: nothing that comes late
/// finds a wrong tensor.
constexpr uint32_t generation_of(step_id step) noexcept {
  return static_cast<uint32_t>((step.value << 32 & step_bits) >> 32);
}

/// @returns the name of the result at `position` that `owner` makes of `asked`
constexpr object_id result_name(rank_id owner, request_id asked, step_id step,
                                size_t position) noexcept {
  uint64_t promise = call_number(asked) & ~promise_bit;
  return {owner,
          name_bit | asked.origin.value << asker_shift
            | promise << promise_shift | position,
          generation_of(step)};
}

/// @returns the request whose result this is, in step 0.
constexpr request_id asked_for(object_id x) noexcept {
  return {rank_id{(x.number & ~name_bit) >> asker_shift},
          promise_number(step_id{}, static_cast<uint32_t>((x.number & slot_bits)
                                                          >> promise_shift))};
}

/// @returns the result of `step` that has this name but for the step
constexpr object_id in_step(object_id x, step_id step) noexcept {
  x.generation = generation_of(step);
  return x;
}

// A request names results that its sender asked for, in its step: both need not
// be said again.

constexpr uint64_t short_name(object_id x) noexcept {
  return x.owner.value << asker_shift | (x.number & slot_bits);
}

constexpr object_id long_name(uint64_t x, rank_id asker,
                              step_id step) noexcept {
  return {rank_id{x >> asker_shift},
          name_bit | asker.value << asker_shift | (x & slot_bits),
          generation_of(step)};
}

} // namespace smp
