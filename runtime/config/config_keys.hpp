#pragma once

// The parts of the one table of configuration keys, for `config_keys` only.

#include "runtime/config/config_schema.hpp"

#include <span>

namespace smp {

// Each table is in the order of docs/config.md.

/// The tables [smp] and [smp.schedule].
std::span<const config_key> session_keys();

/// The table [model].
std::span<const config_key> model_keys();

/// What a run does with the model: all other tables.
std::span<const config_key> run_keys();

// -- shorthands for the entries -----------------------------------------------

#define SMP_SLOT(member)                                                       \
  [](train_config& x) -> config_slot { return &x.member; }

constexpr number_range at_least(double low) {
  return {.low = low};
}

constexpr number_range more_than(double low) {
  return {.low = low, .above_low = true};
}

constexpr number_range between(double low, double high) {
  return {.low = low, .high = high};
}

inline constexpr number_range degree = between(1, 65536);
inline constexpr number_range below_one = {.high = 1, .below_high = true};

/// Seconds to wait. Larger values would overflow clocks in nanoseconds.
inline constexpr number_range patience = {.high = 1e9, .above_low = true};

} // namespace smp
