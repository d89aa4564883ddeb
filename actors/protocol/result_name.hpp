#pragma once

// Names of tensors that their owner keeps.
//
// A result of a request has a name before it exists (R38): the request and the
// position in its answer. In a static flow a name is therefore the same in
// every step, except for the step itself, which is not part of the name but
// travels with the request that refers to it.
//
// Bit 63: a result of a request. Bits 40 to 62: the rank that asked. Bit 39: it
// waited for the answer. Bits 12 to 38: number of such requests before it in
// the step. Bits 0 to 11: the position.
//
// A result of a step: bits 31 to 62: the microbatch. Bits 0 to 30: the
// position.

#include "actors/protocol/request_number.hpp"

#include <cstddef>

namespace smp {

constexpr uint64_t name_bit = uint64_t{1} << 63;
constexpr int asker_shift = 40;
constexpr uint64_t waited_bit = uint64_t{1} << 39;
constexpr int call_shift = 12;
constexpr uint64_t slot_bits = (uint64_t{1} << asker_shift) - 1;

/// If a request has more results than this, none of them has a name.
constexpr size_t max_named_results = size_t{1} << call_shift;

constexpr bool is_result_name(object_id x) noexcept {
  return (x.number & name_bit) != 0;
}

/// The generation of results of `step`: a late message cannot match a tensor of
/// another step.
constexpr uint32_t generation_of(step_id step) noexcept {
  return static_cast<uint32_t>((step.value << 32 & step_bits) >> 32);
}

/// @returns the name of the result at `position` of a microbatch
constexpr object_id step_result_name(rank_id owner, step_id step,
                                     microbatch_id m,
                                     size_t position) noexcept {
  return {owner, m.value << 31 | position, generation_of(step)};
}

/// @returns the name of the result at `position` that `owner` makes of `asked`
constexpr object_id result_name(rank_id owner, request_id asked, step_id step,
                                size_t position) noexcept {
  auto number = call_number(asked);
  uint64_t call = number & ~promise_bit;
  return {owner,
          name_bit | asked.origin.value << asker_shift
            | (number & promise_bit ? 0 : waited_bit) | call << call_shift
            | position,
          generation_of(step)};
}

/// @returns the request whose result this is, in step 0.
constexpr request_id asked_for(object_id x) noexcept {
  auto call = static_cast<uint32_t>((x.number & (waited_bit - 1))
                                    >> call_shift);
  return {rank_id{(x.number & ~name_bit) >> asker_shift},
          x.number & waited_bit ? request_number(step_id{}, call)
                                : promise_number(step_id{}, call)};
}

/// @returns the result of `step` that has the same name otherwise
constexpr object_id in_step(object_id x, step_id step) noexcept {
  x.generation = generation_of(step);
  return x;
}

// A request names only results that its own sender asked for in its own step,
// so short names omit both.

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
