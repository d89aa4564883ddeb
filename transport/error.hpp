#pragma once

#include "transport/ids.hpp"

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

namespace smp {

/// What kind of thing went wrong; decides the exit code of `smp-train`.
enum class error_code : uint8_t {
  none,
  config,      // bad command line, configuration, model or data file
  user_code,   // an exception in a module or in a step body
  rank_down,   // a rank died or left
  cancelled,   // the step ended before this was answered
  protocol,    // a message that no correct rank sends
  transport,   // bytes could not be moved
  unsupported, // legal, but smp cannot do it
  stalled,     // nothing can go on
  numbers,     // non-finite loss
  schedule,    // a user's schedule broke its rules
  internal,    // a defect of smp
};

constexpr error_code last_of(error_code) noexcept {
  return error_code::internal;
}

/// @returns the name of `x` as it is written in error messages.
const char* to_string(error_code x) noexcept;

/// For errors that belong to no rank, e.g. a bad configuration file.
inline constexpr rank_id no_rank{~uint64_t{0}};

/// The first cause of a failure as a value: it travels unchanged to every
/// waiter and to every rank (R6, R39).
struct failure {
  error_code code = error_code::none;
  rank_id rank = no_rank;
  /// Path of the module in the model, e.g. "blocks.3.mlp"; may be empty.
  std::string module;
  std::string text;
  /// The machine of the rank, if the text names it.
  std::string machine = {};

  explicit operator bool() const noexcept {
    return code != error_code::none;
  }

  /// @returns one line: "rank 1, module blocks.3: text"; unknown parts are left
  /// out.
  std::string describe() const;

  bool operator==(const failure&) const = default;
};

/// The one exception that smp throws.
class error : public std::runtime_error {
public:
  explicit error(failure x)
    : std::runtime_error(x.describe()), cause_(std::move(x)) {
    // nop
  }

  error(error_code code, std::string text)
    : error(failure{code, no_rank, {}, std::move(text)}) {
    // nop
  }

  const failure& cause() const noexcept {
    return cause_;
  }

  error_code code() const noexcept {
    return cause_.code;
  }

private:
  failure cause_;
};

/// For errors in what a user provides: a key, a file, a model.
inline error config_error(std::string text) {
  return {error_code::config, std::move(text)};
}

} // namespace smp
