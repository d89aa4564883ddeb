#pragma once

// From TOML to values: what the reader of configurations needs of toml++.

#include "runtime/config/config_schema.hpp"

#include <toml++/toml.h>

#include <optional>
#include <string>

namespace smp {

/// @returns the text of a configuration file
/// @throws error (config) saying why it cannot be read
std::string read_config_text(const std::string& path);

/// Takes a value from the command line; what is no TOML, or should not be read
/// as such (`raw`), counts as a string.
/// @returns a table with the value as "x"
toml::table parse_setting(const std::string& text, bool raw);

/// Stores a value. Negative integers are for the caller.
/// @returns false if it has another type than the slot
bool assign(config_slot to, const toml::node& from);

/// @returns a plain value as text, strings without quotes; nothing for lists,
/// tables and dates.
std::optional<std::string> option_text(const toml::node& x);

/// @returns what was written, for errors: "the string \"8\"".
std::string given_text(const toml::node& x);

} // namespace smp
