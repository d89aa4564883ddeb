#pragma once

// The numbers that name things across ranks.

#include <compare>
#include <cstdint>
#include <functional>

namespace smp {

/// A number that cannot be mistaken for the number of something else.
template <class Tag>
struct strong_id {
  uint64_t value = 0;
  auto operator<=>(const strong_id&) const = default;
};

/// Position of a process in the world, 0 to world size - 1.
using rank_id = strong_id<struct rank_tag>;

/// Counts calls of step functions; equal on all ranks of a pipeline group.
using step_id = strong_id<struct step_tag>;

/// Position of a module in the walk of the model
/// (runtime/model/module_walk.hpp).
using module_id = strong_id<struct module_tag>;

/// Position of a microbatch in its step, from 0.
using microbatch_id = strong_id<struct microbatch_tag>;

/// A WORKER CONTEXT of one rank.
using context_id = strong_id<struct context_tag>;

/// Names a request everywhere: the rank that asked, and its number there.
struct request_id {
  rank_id origin;
  uint64_t number = 0;
  auto operator<=>(const request_id&) const = default;
};

/// Names a tensor that its owner holds (R38). A reused slot gets a new
/// generation, so that a late message never meets the wrong tensor.
struct object_id {
  rank_id owner;
  uint64_t number = 0;
  uint32_t generation = 0;
  auto operator<=>(const object_id&) const = default;
};

enum class phase : uint8_t { forward, backward };

constexpr phase last_of(phase) noexcept {
  return phase::backward;
}

} // namespace smp

template <class Tag>
struct std::hash<smp::strong_id<Tag>> {
  size_t operator()(const smp::strong_id<Tag>& x) const noexcept {
    return std::hash<uint64_t>{}(x.value);
  }
};
