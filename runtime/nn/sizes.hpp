#pragma once

#include "transport/error.hpp"

#include <fmt/format.h>

#include <cstdint>

namespace smp {

// Sizes of models and of data are checked where they are used, so that a
// program that sets them in code gets the same errors as one with a file.

/// @throws error (config) naming `key` unless `value` is at least 1
template <class T>
void require_positive(const char* key, T value) {
  if (value < 1)
    throw error{error_code::config,
                fmt::format("{} is {}, must be at least 1", key, value)};
}

/// @throws error (config) unless `heads` heads share `width` evenly
inline void require_heads(int64_t width, int64_t heads) {
  require_positive("model.heads", heads);
  require_positive("model.width", width);
  if (width % heads != 0)
    throw error{error_code::config,
                fmt::format("model.width ({}) must be a multiple of "
                            "model.heads ({})",
                            width, heads)};
}

/// @throws error (config) naming `key` unless 0 <= `value` < 1
inline void require_probability(const char* key, double value) {
  if (!(value >= 0 && value < 1))
    throw error{
      error_code::config,
      fmt::format("{} is {}, must be at least 0 and less than 1", key, value)};
}

} // namespace smp
