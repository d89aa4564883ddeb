#pragma once

#include "transport/error.hpp"

#include <c10/core/GradMode.h>

#include <cstdint>
#include <string>
#include <string_view>

namespace smp::nn {

/// Tells whether `n` can be divided among ranks such that each gets something.
constexpr bool can_divide(int64_t n, int64_t peers) noexcept {
  return n > 0 && n % peers == 0;
}

/// Why a module cannot be shared, and what would have to change: the numbers
/// next to `n` that can be divided.
/// @returns "its 10 heads cannot be divided among 4 ranks; 8 or 12 could"
inline std::string refusal_to_divide(int64_t n, std::string_view what,
                                     int64_t peers) {
  auto below = n / peers * peers;
  std::string result = "its " + std::to_string(n) + " ";
  result += what;
  result += " cannot be divided among " + std::to_string(peers) + " ranks; ";
  if (below > 0)
    result += std::to_string(below) + " or ";
  return result + std::to_string(below + peers) + " could";
}

/// Collectives are not part of the graph that backward records for a second
/// one.
/// @param name of a collective of the forward phase
/// @throws error (unsupported) if backward records a graph
inline void refuse_second_derivatives(std::string_view name) {
  if (c10::GradMode::is_enabled())
    throw error{error_code::unsupported,
                "backward through '" + std::string{name}
                  + "', which ranks compute together: create_graph (higher "
                    "derivatives) is not supported there"};
}

} // namespace smp::nn
