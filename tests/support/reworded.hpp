#pragma once

// Views of ranks whose texts say something else: no verdict may change by it.

#include "actors/protocol/rank_view.hpp"

#include <cstdint>
#include <random>
#include <string>
#include <vector>

namespace smp {

/// @returns an activity whose texts are drawn from those of other waits, from
/// nonsense and from nothing
inline activity reworded(activity x, std::mt19937& random) {
  const std::vector<std::string> texts{
    "",
    "?",
    "the end of step 1",
    "exchange \"x\"",
    "barrier \"world\" of ranks 0, 1",
    "all_to_all \"left/a7.0\" of ranks 0, 1 (not joined by rank 1)",
    "'left', forward",
    "user code outside of a step",
    "the execution token"};
  for (auto* text : {&x.what, &x.waits_for, &x.brief, &x.awaits})
    *text = texts[random() % texts.size()];
  return x;
}

inline std::vector<rank_view> reworded(std::vector<rank_view> xs,
                                       uint32_t seed) {
  std::mt19937 random{seed};
  for (auto& x : xs)
    for (auto& y : x.activities)
      y = reworded(std::move(y), random);
  return xs;
}

} // namespace smp
