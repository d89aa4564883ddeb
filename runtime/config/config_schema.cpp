#include "runtime/config/config_schema.hpp"

#include "runtime/config/config_keys.hpp"

#include <algorithm>

namespace smp {

std::span<const config_key> config_keys() {
  static const auto result = [] {
    std::vector<config_key> keys;
    for (auto part : {session_keys(), model_keys(), run_keys()})
      keys.insert(keys.end(), part.begin(), part.end());
    return keys;
  }();
  return result;
}

const config_key* find_config_key(std::string_view name) {
  for (auto& key : config_keys())
    if (key.name == name
        || std::find(key.aliases.begin(), key.aliases.end(), name)
             != key.aliases.end())
      return &key;
  return nullptr;
}

bool is_config_table(std::string_view name) {
  if (name == "model.options")
    return true;
  return std::ranges::any_of(config_keys(), [&](const config_key& key) {
    return key.name.size() > name.size() && key.name.starts_with(name)
           && key.name[name.size()] == '.';
  });
}

} // namespace smp
