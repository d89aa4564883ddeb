#include "runtime/config/config_schema.hpp"

#include <fmt/format.h>

namespace smp {

namespace {

std::string_view table_of(const config_key& key) {
  return key.name.substr(0, key.name.rfind('.'));
}

std::string_view leaf_of(const config_key& key) {
  return key.name.substr(key.name.rfind('.') + 1);
}

std::string default_text(const config_key& key) {
  if (key.required && !key.optional_if)
    return "required";
  if (!key.fallback.empty())
    return std::string{key.fallback};
  return fmt::format("`{}`", value_text(key, train_config{}));
}

std::string meaning_text(const config_key& key) {
  std::string result{key.meaning};
  if (!key.aliases.empty())
    result += fmt::format(" (also `{}`)", key.aliases.front());
  std::string conditions;
  for (auto& condition : key.only) {
    std::string wanted;
    for (auto& setting : wanted_settings(condition)) {
      auto plain = setting.front() == '"'
                     ? setting.substr(1, setting.size() - 2)
                     : setting;
      wanted += (wanted.empty() ? "`" : ", `") + plain + "`";
    }
    conditions += (conditions.empty() ? "" : " with ") + wanted;
  }
  if (conditions.empty())
    return result;
  return fmt::format("{} ({} only)", result, conditions);
}

/// The lines of all keys that begin with `prefix`.
std::string settings_of(const train_config& values, std::string_view prefix) {
  std::string result;
  for (auto& key : config_keys())
    if (!key.local && key.name.starts_with(prefix) && applies(key, values))
      result += fmt::format("{} = {}\n", key.name, value_text(key, values));
  return result;
}

} // namespace

std::string shared_settings(const train_config& x) {
  auto values = effective(x);
  auto result = settings_of(values, "");
  for (auto& [name, value] : values.model.options)
    result += fmt::format("model.options.{} = {}\n", name, smp::quoted(value));
  return result;
}

std::string shared_settings(const session_config& x) {
  train_config whole;
  whole.smp = x;
  return settings_of(effective(whole), "smp.");
}

namespace {

std::string origin_of(const config_key& key, const train_config& x) {
  auto at = x.origins.find(std::string{key.name});
  return at == x.origins.end() ? std::string{} : "  # " + at->second;
}

} // namespace

std::string to_toml(const train_config& x, bool with_origins) {
  auto values = effective(x);
  std::string result;
  std::string_view table;
  for (auto& key : config_keys()) {
    if (!applies(key, x))
      continue;
    if (table_of(key) != table) {
      table = table_of(key);
      result += fmt::format("{}[{}]\n", result.empty() ? "" : "\n", table);
    }
    auto given = value_text(key, x);
    if (!given.empty())
      result += fmt::format("{} = {}{}\n", leaf_of(key), given,
                            with_origins ? origin_of(key, x) : std::string{});
    else if (auto value = value_text(key, values); !value.empty())
      result += fmt::format("# {} = {} follows from other keys\n", leaf_of(key),
                            value);
    else
      result += fmt::format("# {}: {}\n", leaf_of(key), key.fallback);
  }
  if (!x.model.options.empty())
    result += "\n[model.options]\n";
  for (auto& [name, value] : x.model.options)
    result += fmt::format("{} = {}\n", smp::quoted(name), smp::quoted(value));
  return result;
}

std::string config_reference() {
  std::string result;
  std::string_view table;
  for (auto& key : config_keys()) {
    if (table_of(key) != table) {
      table = table_of(key);
      result += fmt::format(
        "{}### [{}]\n\n"
        "| key | default | allowed | meaning |\n"
        "| --- | --- | --- | --- |\n",
        result.empty() ? "" : "\n", table);
    }
    auto allowed = allowed_text(key);
    result += fmt::format(
      "| `{}` | {} | {} | {} |\n", leaf_of(key), default_text(key),
      allowed.empty() ? type_text(key) : allowed, meaning_text(key));
  }
  return result;
}

} // namespace smp
