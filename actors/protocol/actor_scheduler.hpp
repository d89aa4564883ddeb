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

/// A pool that lets threads of others run what they made ready: see `run_here`.
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
    // Those of every scheduler.
  }

  /// Runs `job` on the calling thread until its mailbox is empty, or leaves
  /// what many messages left of it to the pool.
  void run(caf::resumable* job);

protected:
  void enqueue(caf::resumable* job) override;

private:
  /// Where actors that run on no thread of the pool find their system. Outlives
  /// each run: an actor keeps the last one that it ran on.
  caf::scoped_execution_unit unit_;
};

/// An actor that a message of this scope wakes up runs on the calling thread,
/// at the end of the scope: a wake-up of the pool's thread costs 20 us, and a
/// call of a module on another rank would pay for four. An actor that runs
/// already is left to whoever runs it. For threads that have nothing else to
/// do, with no lock held that a handler might want. Inside of a handler, and in
/// a scope within a scope, it does nothing.
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
