#pragma once

// Schedules that users write: actors of a published interface. The one public
// header with CAF in it; docs/schedules.md shows how to use it.

#include "actors/schedule/schedule_events.hpp"
#include "transport/inspect.hpp"

#include <caf/actor_system.hpp>
#include <caf/stateful_actor.hpp>
#include <caf/type_id.hpp>
#include <caf/typed_actor.hpp>
#include <caf/typed_event_based_actor.hpp>

#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>

namespace smp {

// -- messages -----------------------------------------------------------------

template <class Inspector>
bool inspect(Inspector& f, task& x) {
  return f.object(x).fields(f.field("microbatch", x.microbatch),
                            f.field("what", x.what));
}

template <class Inspector>
bool inspect(Inspector& f, step_begins& x) {
  return f.object(x).fields(f.field("step", x.step),
                            f.field("microbatches", x.microbatches),
                            f.field("partitions", x.partitions),
                            f.field("active", x.active));
}

template <class Inspector>
bool inspect(Inspector& f, task_started& x) {
  return f.object(x).fields(f.field("what", x.what));
}

template <class Inspector>
bool inspect(Inspector& f, forward_ended& x) {
  return f.object(x).fields(f.field("microbatch", x.microbatch));
}

template <class Inspector>
bool inspect(Inspector& f, backward_ready& x) {
  return f.object(x).fields(f.field("microbatch", x.microbatch));
}

template <class Inspector>
bool inspect(Inspector& f, backward_ended& x) {
  return f.object(x).fields(f.field("microbatch", x.microbatch));
}

template <class Inspector>
bool inspect(Inspector& f, memory_level& x) {
  return f.object(x).fields(f.field("pp_rank", x.pp_rank),
                            f.field("bytes", x.bytes));
}

template <class Inspector>
bool inspect(Inspector& f, rank_activity& x) {
  return f.object(x).fields(f.field("pp_rank", x.pp_rank),
                            f.field("busy", x.busy));
}

template <class Inspector>
bool inspect(Inspector& f, schedule_answer& x) {
  return f.object(x).fields(f.field("next", x.next));
}

/// Type ids of smp come before this one, those of users after it.
inline constexpr caf::type_id_t first_user_type_id
  = caf::first_custom_type_id + 200;

} // namespace smp

CAF_BEGIN_TYPE_ID_BLOCK(smp_schedule, caf::first_custom_type_id + 100)
  CAF_ADD_TYPE_ID(smp_schedule, (smp::task))
  CAF_ADD_TYPE_ID(smp_schedule, (smp::step_begins))
  CAF_ADD_TYPE_ID(smp_schedule, (smp::task_started))
  CAF_ADD_TYPE_ID(smp_schedule, (smp::forward_ended))
  CAF_ADD_TYPE_ID(smp_schedule, (smp::backward_ready))
  CAF_ADD_TYPE_ID(smp_schedule, (smp::backward_ended))
  CAF_ADD_TYPE_ID(smp_schedule, (smp::memory_level))
  CAF_ADD_TYPE_ID(smp_schedule, (smp::rank_activity))
  CAF_ADD_TYPE_ID(smp_schedule, (smp::schedule_answer))
CAF_END_TYPE_ID_BLOCK(smp_schedule)

namespace smp {

// -- the interface ------------------------------------------------------------

/// SCHEDULE ACTOR: decides which microbatch starts or turns around next, in
/// place of `smp.pipeline`'s built-in schedules. It lives on pp_rank 0, one
/// instance for all steps, on a thread of its own. It gets one message at a
/// time and answers each with the next task or with "wait"; the next message
/// comes after the answer.
///
/// Every answer is checked. A step ends with an error that names the actor and
/// the event if the actor throws, does not answer within
/// `smp.schedule.timeout`, names a task twice, too early or of no microbatch of
/// the step, exceeds `smp.active_microbatches`, or waits while nothing is in
/// flight. The next step then gets a new instance.
using schedule_actor = caf::typed_actor<
  // First in each step; from pp_rank 0.
  caf::result<schedule_answer>(step_begins),
  // After each task that it named; from pp_rank 0.
  caf::result<schedule_answer>(task_started),
  // Once per microbatch; from pp_rank 0.
  caf::result<schedule_answer>(forward_ended),
  // Once per microbatch that has a backward phase; from pp_rank 0.
  caf::result<schedule_answer>(backward_ready),
  // Once per microbatch; from pp_rank 0.
  caf::result<schedule_answer>(backward_ended),
  // When a rank begins or ends to work, if its level moved since; from each
  // rank. While an answer is due only the last one of each rank is kept.
  caf::result<schedule_answer>(memory_level),
  // When a rank begins or ends to work; from each rank, as above.
  caf::result<schedule_answer>(rank_activity)>;

/// What an instance is made with.
struct schedule_setup {
  /// `smp.schedule.options`, as the user wrote it.
  std::string options;
  uint64_t partitions = 1;
};

/// A kind of schedule actors: a name for errors and a way to make one.
class schedule_actor_type {
public:
  using spawn_function = std::function<
    schedule_actor(caf::actor_system&, const schedule_setup&, bool own_thread)>;

  schedule_actor_type(std::string name, spawn_function spawn)
    : name_(std::move(name)), spawn_(std::move(spawn)) {
    // nop
  }

  const std::string& name() const noexcept {
    return name_;
  }

  /// @param own_thread else the actor runs in the pool, where it must not block
  schedule_actor spawn(caf::actor_system& sys, const schedule_setup& setup,
                       bool own_thread) const {
    return spawn_(sys, setup, own_thread);
  }

private:
  std::string name_;
  spawn_function spawn_;
};

/// Makes a kind of schedule actors from a function
/// `schedule_actor::behavior_type f(POINTER self, schedule_setup setup)`, where
/// POINTER is `schedule_actor::pointer`, or
/// `schedule_actor::stateful_pointer<STATE>` for an actor with a state.
template <class Pointer>
std::shared_ptr<const schedule_actor_type>
make_schedule_actor_type(std::string name,
                         schedule_actor::behavior_type (*f)(Pointer,
                                                            schedule_setup)) {
  // The text of an exception is worth more in an error than on a terminal.
  auto body = [f](Pointer self,
                  schedule_setup setup) -> schedule_actor::behavior_type {
    self->set_exception_handler([](std::exception_ptr& x) {
      try {
        std::rethrow_exception(x);
      } catch (const std::exception& e) {
        return caf::make_error(caf::sec::runtime_error, e.what());
      } catch (...) {
        return caf::make_error(caf::sec::runtime_error, "unknown exception");
      }
    });
    return f(self, std::move(setup));
  };
  auto spawn = [body](caf::actor_system& sys, const schedule_setup& setup,
                      bool own_thread) -> schedule_actor {
    if (own_thread)
      return sys.spawn<caf::detached>(body, setup);
    return sys.spawn(body, setup);
  };
  return std::make_shared<schedule_actor_type>(std::move(name), spawn);
}

// -- plug-ins -----------------------------------------------------------------

/// The schedules of a plug-in, by name.
class schedule_registry {
public:
  /// @param f see `make_schedule_actor_type`
  template <class F>
  void add(const std::string& name, F* f) {
    types_[name] = make_schedule_actor_type(name, f);
  }

  const std::map<std::string, std::shared_ptr<const schedule_actor_type>>&
  types() const noexcept {
    return types_;
  }

private:
  std::map<std::string, std::shared_ptr<const schedule_actor_type>> types_;
};

/// Moves with every change of this header that an old plug-in would not notice.
#define SMP_SCHEDULE_INTERFACE 1

} // namespace smp

/// Opens the function in which a plug-in names its schedules:
///
///   SMP_SCHEDULES(registry) {
///     registry.add("mine", my_schedule);
///   }
#define SMP_SCHEDULES(registry)                                                \
  extern "C" int smp_schedule_interface() {                                    \
    return SMP_SCHEDULE_INTERFACE;                                             \
  }                                                                            \
  extern "C" void smp_register_schedules(smp::schedule_registry& registry)
