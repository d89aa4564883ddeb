#pragma once

// From TOML to values: the toml++ helpers of the configuration reader.

#include "runtime/config/config_schema.hpp"

#include <toml++/toml.h>

#include <optional>
#include <string>

namespace smp {

/// @returns the text of a configuration file
/// @throws error (config) saying why it cannot be read
std::string read_config_text(const std::string& path);

/// Parses a value from the command line; text that is not TOML, or that should
/// not be read as TOML (`raw`), counts as a string.
/// @returns a table with the value as "x"
toml::table parse_setting(const std::string& text, bool raw);

/// Stores a value. The caller checks for negative integers.
/// @returns false if it has another type than the slot
bool assign(config_slot to, const toml::node& from);

/// @returns a plain value as text, strings without quotes; nothing for lists,
/// tables and dates.
std::optional<std::string> option_text(const toml::node& x);

/// @returns what was written, for errors: "the string \"8\"".
std::string given_text(const toml::node& x);

} // namespace smp
