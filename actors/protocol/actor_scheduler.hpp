#pragma once

#include <caf/actor_system.hpp>
#include <caf/detail/type_list.hpp>
#include <caf/policy/work_sharing.hpp>
#include <caf/resumable.hpp>
#include <caf/scheduler/coordinator.hpp>
#include <caf/scoped_execution_unit.hpp>

#include <utility>
#include <vector>

namespace smp {

/// A pool whose actors can also run on other threads: see `run_here`.
class actor_scheduler final
  : public caf::scheduler::coordinator<caf::policy::work_sharing> {
public:
  using super = caf::scheduler::coordinator<caf::policy::work_sharing>;

  explicit actor_scheduler(caf::actor_system& system)
    : super(system), unit_(&system) {
    // nop
  }

  static caf::actor_system::module* make(caf::actor_system& system,
                                         caf::detail::type_list<>) {
    return new actor_scheduler(system);
  }

  static void add_module_options(caf::actor_system_config&) {
    // Only the options that every scheduler has.
  }

  /// Runs `job` on the calling thread until its mailbox is empty; after many
  /// messages, hands the rest to the pool.
  void run(caf::resumable* job);

protected:
  void enqueue(caf::resumable* job) override;

private:
  /// Execution unit of actors that run outside the pool's thread. Must outlive
  /// every run: an actor keeps a pointer to the unit that it last ran on.
  caf::scoped_execution_unit unit_;
};

/// Actors that messages sent in this scope make ready run on the calling thread
/// at the end of the scope. Waking the pool's thread costs 20 us, and a call of
/// a module on another rank would pay that four times. An actor that already
/// runs elsewhere stays there. Use it only on a thread that has nothing else to
/// do and holds no lock that a handler may take. No effect inside a handler or
/// when nested.
class run_here {
public:
  run_here() noexcept;
  ~run_here();
  run_here(const run_here&) = delete;
  run_here& operator=(const run_here&) = delete;

private:
  friend class actor_scheduler;

  std::vector<std::pair<actor_scheduler*, caf::resumable*>> ready_;
  bool outermost_;
};

} // namespace smp
