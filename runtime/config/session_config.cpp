#include "runtime/config/session_config.hpp"

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

} // namespace smp
