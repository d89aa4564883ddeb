#include "runtime/config/session_config.hpp"

#include "runtime/config/config_schema.hpp"
#include "transport/error.hpp"

#include <algorithm>
#include <string_view>

namespace smp {

uint64_t effective_active_microbatches(const session_config& x) {
  return x.active_microbatches.value_or(default_active_microbatches(
    x.pipeline, x.microbatches, x.pipeline_parallel_degree));
}

double effective_memory_weight(const session_config& x) {
  if (x.memory_weight)
    return *x.memory_weight;
  return x.optimize == "speed" ? 0.2 : 0.8;
}

namespace {

bool is_of_session(std::string_view key) {
  return key.starts_with("smp.") || key.starts_with("monitor.");
}

} // namespace

void validate(const session_config& x) {
  train_config whole;
  whole.smp = x;
  std::string errors;
  auto add = [&](const std::string& line) {
    if (!errors.empty())
      errors += '\n';
    errors += line;
  };
  for (auto& key : config_keys())
    if (key.slot != nullptr && is_of_session(key.name))
      if (auto wrong = check_value(key, whole))
        add(*wrong);
  // Rules on several keys mean little while one of them is wrong by itself, and
  // what else could conflict is not set.
  if (errors.empty())
    for (auto& conflict : conflicts(whole))
      if (std::ranges::all_of(conflict.keys, is_of_session))
        add(conflict.text);
  if (!errors.empty())
    throw error{error_code::config, errors};
}

} // namespace smp
