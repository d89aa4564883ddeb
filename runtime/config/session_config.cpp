#include "runtime/config/session_config.hpp"

#include "runtime/config/config_schema.hpp"
#include "transport/error.hpp"

#include <fmt/format.h>

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

std::vector<config_conflict> conflicts(const session_config& x) {
  std::vector<config_conflict> result;
  // R2: all microbatches may be alive at once.
  if ((x.pipeline == "simple" || x.pipeline == "list") && x.active_microbatches
      && *x.active_microbatches < x.microbatches)
    result.push_back(
      {{"smp.active_microbatches", "smp.microbatches", "smp.pipeline"},
       fmt::format("smp.active_microbatches = {} is less than "
                   "smp.microbatches = {}, so smp.pipeline = \"{}\" "
                   "would wait for ever; write at least {}, or smp.pipeline = "
                   "\"interleaved\"",
                   *x.active_microbatches, x.microbatches, x.pipeline,
                   x.microbatches)});
  if (x.pipeline == "list")
    try {
      list_schedule{x.microbatches, x.schedule.list};
    } catch (const error& e) {
      result.push_back(
        {{"smp.schedule.list", "smp.microbatches"}, e.cause().text});
    }
  if (x.pipeline == "interleaved_1f1b" && x.chunks == 1)
    result.push_back(
      {{"smp.pipeline", "smp.chunks"},
       "smp.pipeline = \"interleaved_1f1b\" has nothing to interleave with "
       "smp.chunks = 1; write smp.chunks = 2 or more, or smp.pipeline = "
       "\"1f1b\""});
  if (x.chunks > 1 && x.strategy == "paper")
    result.push_back({{"smp.chunks", "smp.strategy"},
                      fmt::format("smp.chunks = {} cannot go with smp.strategy "
                                  "= \"paper\", which gives each rank one "
                                  "part; write smp.strategy = \"balanced\"",
                                  x.chunks)});
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
    if (key.slot != nullptr
        && (key.name.starts_with("smp.") || key.name.starts_with("monitor.")))
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
