// What a user might write and no built-in schedule does, for tests: odd
// microbatches start first, then even ones, and of those that are ready the
// youngest turns around first.

#include "smp/schedule_actor.hpp"

#include <algorithm>
#include <cstdint>
#include <vector>

namespace {

struct state {
  static inline const char* name = "test.unusual-schedule";

  void begin(const smp::step_begins& x) {
    waiting.clear();
    ready.clear();
    for (uint64_t parity : {1, 0})
      for (auto i = parity; i < x.microbatches; i += 2)
        waiting.push_back(smp::microbatch_id{i});
    alive = 0;
    most_alive = x.active;
  }

  smp::schedule_answer next() {
    if (!ready.empty()) {
      auto youngest = std::max_element(ready.begin(), ready.end());
      auto x = *youngest;
      ready.erase(youngest);
      return smp::start_backward(x);
    }
    if (waiting.empty() || alive == most_alive)
      return smp::wait_for_event();
    auto x = waiting.front();
    waiting.erase(waiting.begin());
    ++alive;
    return smp::start_forward(x);
  }

  std::vector<smp::microbatch_id> waiting; // for their start
  std::vector<smp::microbatch_id> ready;   // for their backward phase
  uint64_t alive = 0;
  uint64_t most_alive = 0;
};

smp::schedule_actor::behavior_type
unusual(smp::schedule_actor::stateful_pointer<state> self,
        smp::schedule_setup) {
  auto& st = self->state;
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
    [&st](const smp::memory_level&) { return st.next(); },
    [&st](const smp::rank_activity&) { return st.next(); },
  };
}

} // namespace

SMP_SCHEDULES(registry) {
  registry.add("unusual", unusual);
}
