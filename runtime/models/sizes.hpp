#pragma once

#include "transport/error.hpp"

#include <fmt/format.h>

namespace smp {

/// Sizes of models and of data are checked where they are used, so that a
/// program that sets them in code hears the same as one with a file.
/// @throws error (config) naming `key` unless `value` is at least 1
template <class T>
void require_positive(const char* key, T value) {
  if (value < 1)
    throw error{error_code::config,
                fmt::format("{} is {}, must be at least 1", key, value)};
}

} // namespace smp
