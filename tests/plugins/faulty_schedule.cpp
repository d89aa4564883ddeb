// A schedule with a fault of choice (smp.schedule.options), for tests. The
// instance that is played before the first step has none, but where the option
// is a file: as long as it is there, each instance is wrong from the start.

#include "smp/schedule_actor.hpp"

#include <caf/event_based_actor.hpp>

#include <filesystem>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

#include <unistd.h>

namespace {

int instances = 0;

struct state {
  static inline const char* name = "test.faulty-plugin";

  smp::schedule_answer next() {
    if (std::exchange(ready, false))
      return smp::start_backward(smp::microbatch_id{at - 1});
    if (!running && at < size) {
      running = true;
      return smp::start_forward(smp::microbatch_id{at++});
    }
    return smp::wait_for_event();
  }

  uint64_t size = 0;
  uint64_t at = 0;    // the next microbatch
  bool ready = false; // the last one waits for its backward phase
  bool running = false;
  std::string fault;
  int steps = 0;
  caf::typed_response_promise<smp::schedule_answer> never;
};

/// One microbatch after the other.
smp::schedule_actor::behavior_type
faulty(smp::schedule_actor::stateful_pointer<state> self,
       smp::schedule_setup setup) {
  auto& st = self->state;
  static constexpr std::string_view later = "later ";
  if (instances++ > 0 && !setup.options.starts_with(later))
    st.fault = setup.options;
  auto next = [&st] { return st.next(); };
  return {
    [&st, file = setup.options](const smp::step_begins& x) {
      if (++st.steps == 3 && file.starts_with(later))
        st.fault = file.substr(later.size());
      if (std::filesystem::is_regular_file(file))
        return smp::start_backward(smp::microbatch_id{0});
      st.size = x.microbatches;
      st.at = 0;
      st.ready = false;
      st.running = false;
      return st.next();
    },
    [next](const smp::task_started&) { return next(); },
    [next](const smp::forward_ended&) { return next(); },
    [self,
     &st](const smp::backward_ready& x) -> caf::result<smp::schedule_answer> {
      if (x.microbatch.value == 1 && st.fault == "throws")
        throw std::runtime_error("on purpose");
      if (x.microbatch.value == 1 && st.fault == "silent") {
        st.never = self->make_response_promise<smp::schedule_answer>();
        return st.never;
      }
      if (x.microbatch.value == 1 && st.fault == "blocks")
        self->spawn([] { ::pause(); }); // holds the thread of all actors
      if (x.microbatch.value == 1 && st.fault == "twice")
        return smp::start_forward(smp::microbatch_id{0});
      st.ready = true;
      return st.next();
    },
    [&st](const smp::backward_ended&) {
      st.running = false;
      return st.next();
    },
    [next](const smp::memory_level&) { return next(); },
    [next](const smp::rank_activity&) { return next(); },
  };
}

} // namespace

SMP_SCHEDULES(registry) {
  registry.add("faulty", faulty);
}
