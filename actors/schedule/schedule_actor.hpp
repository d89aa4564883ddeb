#pragma once

// Schedules that users write, as actors with a published interface. The only
// public header that includes CAF; docs/schedules.md shows how to use it.

#include "actors/protocol/plain_text.hpp"
#include "actors/protocol/schedule_interface.hpp"

#include <caf/actor_system.hpp>
#include <caf/stateful_actor.hpp>

#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>

namespace smp {

// -- kinds --------------------------------------------------------------------

/// Arguments for a new instance.
struct schedule_setup {
  /// `smp.schedule.options`, verbatim.
  std::string options;
  uint64_t partitions = 1;
};

/// A kind of schedule actors: its name, for errors, and its factory.
class schedule_actor_type {
public:
  using spawn_function = std::function<schedule_actor(
    caf::actor_system&, const schedule_setup&, bool own_thread)>;

  schedule_actor_type(std::string name, spawn_function spawn)
    : name_(std::move(name)), spawn_(std::move(spawn)) {
    // nop
  }

  const std::string& name() const noexcept {
    return name_;
  }

  /// @param own_thread if false, the actor runs in the pool and must not block
  schedule_actor spawn(caf::actor_system& sys, const schedule_setup& setup,
                       bool own_thread) const {
    return spawn_(sys, setup, own_thread);
  }

private:
  std::string name_;
  spawn_function spawn_;
};

/// Makes a kind of schedule actors from what behaves like a function
/// `schedule_actor::behavior_type f(POINTER self, schedule_setup setup)`, where
/// POINTER is `schedule_actor::pointer`, or
/// `schedule_actor::stateful_pointer<STATE>` for an actor with a state.
template <class Pointer, class F>
std::shared_ptr<const schedule_actor_type>
make_schedule_actor_type(std::string name, F f) {
  auto body = [f](Pointer self,
                  schedule_setup setup) -> schedule_actor::behavior_type {
    self->set_exception_handler(
      [](std::exception_ptr& x) { return error_of_exception(x); });
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

/// The same from a function.
template <class Pointer>
std::shared_ptr<const schedule_actor_type> make_schedule_actor_type(
  std::string name,
  schedule_actor::behavior_type (*f)(Pointer, schedule_setup)) {
  return make_schedule_actor_type<Pointer, decltype(f)>(std::move(name), f);
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

/// Incremented when this header changes in a way old plug-ins cannot notice.
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
