#include "runtime/config.hpp"

#include "runtime/config_schema.hpp"
#include "transport/error.hpp"

#include <fmt/format.h>

namespace smp {

uint64_t effective_active_microbatches(const session_config& x) {
  if (x.active_microbatches)
    return *x.active_microbatches;
  if (x.pipeline == "simple")
    return x.microbatches;
  return x.pipeline_parallel_degree + 2;
}

double effective_memory_weight(const session_config& x) {
  if (x.memory_weight)
    return *x.memory_weight;
  return x.optimize == "speed" ? 0.2 : 0.8;
}

std::vector<config_conflict> conflicts(const session_config& x) {
  std::vector<config_conflict> result;
  // R2: all forward phases come first, so all microbatches are alive at once.
  if (x.pipeline == "simple" && x.active_microbatches
      && *x.active_microbatches < x.microbatches)
    result.push_back(
      {{"smp.active_microbatches", "smp.microbatches", "smp.pipeline"},
       fmt::format("smp.active_microbatches = {} is less than "
                   "smp.microbatches = {}, so smp.pipeline = \"simple\" "
                   "would wait for ever; write at least {}, or smp.pipeline = "
                   "\"interleaved\"",
                   *x.active_microbatches, x.microbatches, x.microbatches)});
  if (x.auto_partition && x.default_partition != 0)
    result.push_back(
      {{"smp.default_partition", "smp.auto_partition"},
       fmt::format("smp.default_partition = {} has no effect with "
                   "smp.auto_partition = true; write smp.auto_partition = "
                   "false, or leave it out",
                   x.default_partition)});
  if (x.default_partition >= x.pipeline_parallel_degree)
    result.push_back(
      {{"smp.default_partition", "smp.pipeline_parallel_degree"},
       fmt::format("smp.default_partition = {} does not exist with "
                   "smp.pipeline_parallel_degree = {}; allowed: 0 to {}",
                   x.default_partition, x.pipeline_parallel_degree,
                   x.pipeline_parallel_degree - 1)});
  return result;
}

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
    if (key.slot != nullptr && key.name.starts_with("smp."))
      if (auto wrong = check_value(key, whole))
        add(*wrong);
  // Rules on several keys mean little while one of them is wrong by itself.
  if (errors.empty())
    for (auto& conflict : conflicts(x))
      add(conflict.text);
  if (!errors.empty())
    throw error{error_code::config, errors};
}

} // namespace smp
