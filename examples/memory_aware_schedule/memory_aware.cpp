// A schedule that looks at memory: like 1F1B, but no new microbatch begins
// while any rank keeps more than a limit. docs/schedules.md explains it.
//
//   [smp]
//   pipeline = "actor"
//   schedule.plugin = "memory_aware.so"
//   schedule.name = "memory_aware"
//   schedule.options = "limit_mb=512"

#include "smp/schedule_actor.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

/// Everything the actor knows. Only its own messages touch it, one at a time.
struct state {
  static inline const char* name = "memory-aware";

  /// Forgets the last step.
  void begin(const smp::step_begins& x) {
    microbatches = x.microbatches;
    most_alive = x.active;
    started = alive = 0;
    ready.clear();
    levels.assign(x.partitions, 0);
  }

  /// A backward phase frees memory, so one that can start goes first.
  smp::schedule_answer next() {
    if (!ready.empty()) {
      auto oldest = std::min_element(ready.begin(), ready.end());
      auto x = *oldest;
      ready.erase(oldest);
      return smp::start_backward(x);
    }
    if (started == microbatches || alive == most_alive)
      return smp::wait_for_event();
    // With nothing alive there is nothing to wait for, full memory or not.
    if (alive > 0 && *std::max_element(levels.begin(), levels.end()) > limit)
      return smp::wait_for_event();
    ++alive;
    return smp::start_forward(smp::microbatch_id{started++});
  }

  uint64_t limit = 0; // bytes
  uint64_t microbatches = 0;
  uint64_t most_alive = 0;
  uint64_t started = 0;
  uint64_t alive = 0;                    // started and not ended
  std::vector<smp::microbatch_id> ready; // for their backward phase
  std::vector<uint64_t> levels;          // bytes, by pp_rank
};

/// @returns the limit in bytes of "limit_mb=N".
uint64_t parse_limit(const std::string& options) {
  const std::string key = "limit_mb=";
  if (!options.starts_with(key))
    throw std::invalid_argument("smp.schedule.options: write limit_mb=N");
  return std::stoull(options.substr(key.size())) * 1'000'000;
}

smp::schedule_actor::behavior_type
memory_aware(smp::schedule_actor::stateful_pointer<state> self,
             smp::schedule_setup setup) {
  auto& st = self->state;
  st.limit = parse_limit(setup.options);
  return {
    [&st](const smp::step_begins& x) {
      st.begin(x);
      return st.next();
    },
    [&st](const smp::task_started&) { return st.next(); },
    [&st](const smp::forward_ended&) { return st.next(); },
    [&st](const smp::backward_ready& x) {
      st.ready.push_back(x.microbatch);
      return st.next();
    },
    [&st](const smp::backward_ended&) {
      --st.alive;
      return st.next();
    },
    [&st](const smp::memory_level& x) {
      st.levels.at(x.pp_rank) = x.bytes;
      return st.next();
    },
    [&st](const smp::rank_activity&) { return st.next(); },
  };
}

} // namespace

SMP_SCHEDULES(registry) {
  registry.add("memory_aware", memory_aware);
}
