#pragma once

// The one table of all configuration keys: parsing, defaults, checks and
// docs/config.md come from it. A new key is one entry in *_keys.cpp and one
// member in config_file.hpp.

#include "runtime/config/config_file.hpp"

#include <limits>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <variant>

namespace smp {

/// Where the value of a key is stored; its type is the type of the key.
using config_slot = std::variant<
  bool*, uint64_t*, double*, std::string*, std::array<double, 2>*,
  std::optional<uint64_t>*, std::optional<double>*, std::optional<bool>*,
  std::optional<loss_scale_setting>*, std::vector<uint64_t>*,
  std::vector<std::string>*, std::vector<task>*,
  std::map<std::string, uint64_t>*>;

/// Values that a number may take.
struct number_range {
  double low = 0;
  double high = std::numeric_limits<double>::infinity();
  /// The bounds themselves are excluded.
  bool above_low = false;
  bool below_high = false;
};

/// A string or bool key, and those of its values with which another
/// key has an effect.
struct config_condition {
  std::string_view key;
  std::vector<std::string_view> values;
  /// A bool key that satisfies the condition, too, if it is true.
  std::string_view or_key = {};
};

/// One key, e.g. "smp.microbatches". Lists may be empty.
struct config_key {
  std::string_view name;
  /// @returns where the value is stored.
  config_slot (*slot)(train_config&) = nullptr;
  std::string_view meaning;
  /// The default in words, where it follows from other keys.
  std::string_view fallback = {};
  bool required = false;
  /// Not required while this holds.
  std::optional<config_condition> optional_if = {};
  number_range range = {};
  /// Allowed strings; any string if empty.
  std::vector<std::string_view> choices = {};
  /// Other accepted names.
  std::vector<std::string_view> aliases = {};
  /// Its names in other systems, for hints to users who write those here.
  std::vector<std::string_view> elsewhere = {};
  /// The key has an effect only while all of these hold.
  std::vector<config_condition> only = {};
  /// Ranks may differ in it.
  bool local = false;
  /// A file that must exist, or several; relative to where the key is set.
  bool is_file = false;
  /// The file may be a folder instead,
  bool or_folder = false;
  /// but only while this holds, if it is set.
  std::optional<config_condition> folder_if = {};
  /// A folder; relative to where the key is set.
  bool is_folder = false;
  /// Values of a folder key that are not paths.
  std::vector<std::string_view> no_paths = {};
};

/// All keys, those of one TOML table together.
std::span<const config_key> config_keys();

/// @returns the key of this name or alias, or null.
const config_key* find_config_key(std::string_view name);

/// @returns true if `name` is a table, e.g. "optimizer.schedule".
bool is_config_table(std::string_view name);

/// @returns the first condition of `key` that does not hold, or null.
const config_condition* broken_condition(const config_key& key,
                                         const train_config& x);

/// @returns true if no other key makes `key` meaningless.
inline bool applies(const config_key& key, const train_config& x) {
  return broken_condition(key, x) == nullptr;
}

/// @returns what a condition asks for, as a user would write it: the values
/// alone if they are strings, else "KEY = VALUE".
std::vector<std::string> wanted_settings(const config_condition& x);

/// @returns what is wrong with a key whose condition `broken` does not hold.
/// @param place where the key of the condition was set; may be empty
std::string no_effect_text(const config_key& key,
                           const config_condition& broken,
                           const train_config& x, std::string_view place);

/// @returns true if `x` needs the key to be set.
bool is_required(const config_key& key, const train_config& x);

/// @returns true if the file that the key names may be a folder of them.
bool may_be_folder(const config_key& key, const train_config& x);

/// @returns `x` as a TOML string.
std::string quoted(std::string_view x);

/// @returns the value as TOML; empty for an optional without one.
std::string value_text(const config_key& key, const train_config& x);

/// @returns what the value of the key may be: "\"ucx\", \"loopback\"",
/// "1 or more"; empty if any value of its type will do.
std::string allowed_text(const config_key& key);

/// @returns "an integer", "a string", ...
std::string_view type_text(const config_key& key);

bool is_integer(const config_key& key);

/// @returns what is wrong with the value by itself, or nothing.
std::optional<std::string> check_value(const config_key& key,
                                       const train_config& x);

/// @returns the key that was meant by a name that does not exist, or nothing
std::string_view key_meant_by(std::string_view name);

/// @returns "; did you mean ...?" or another hint for a key
/// that does not exist.
std::string hint_for_unknown_key(std::string_view name);

/// Same for a table that does not exist.
std::string hint_for_unknown_table(std::string_view name);

/// @returns " (did you mean \"simple\"?)", or nothing if no choice is near.
std::string hint_for_unknown_choice(const config_key& key,
                                    std::string_view value);

/// Values that cannot be combined.
struct config_conflict {
  /// All keys involved, e.g. "smp.microbatches".
  std::vector<std::string> keys;
  std::string text;
  /// A short trial of a long run's configuration has it, too: no error.
  bool can_be_meant = false;
};

/// @returns the rules on several keys that `x` breaks
std::vector<config_conflict> conflicts(const train_config& x);

} // namespace smp
