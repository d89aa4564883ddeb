#include "actors/protocol/actor_scheduler.hpp"

#include "transport/refuse_waits.hpp"

namespace smp {

namespace {

/// Number of messages that one actor handles before others on its thread: a
/// thread that runs actors on the side soon has other work.
constexpr size_t messages_per_run = 16;

struct scope_of_thread {
  /// Collects the actors that this thread makes ready.
  run_here* gathering = nullptr;
  /// True while this thread runs the actors of a scope.
  bool running = false;
};

thread_local scope_of_thread scope;

} // namespace

// -- scheduler ----------------------------------------------------------------

void actor_scheduler::enqueue(caf::resumable* job) {
  if (scope.gathering != nullptr)
    scope.gathering->ready_.emplace_back(this, job);
  else
    super::enqueue(job);
}

// Same as the workers of CAF.
void actor_scheduler::run(caf::resumable* job) {
  switch (job->resume(&unit_, messages_per_run)) {
    case caf::resumable::resume_later:
      super::enqueue(job);
      break;
    case caf::resumable::done:
    case caf::resumable::awaiting_message:
    case caf::resumable::shutdown_execution_unit:
      caf::intrusive_ptr_release(job);
  }
}

// -- scope --------------------------------------------------------------------

run_here::run_here() noexcept
  : outermost_(scope.gathering == nullptr && !scope.running) {
  if (outermost_)
    scope.gathering = this;
}

run_here::~run_here() {
  if (!outermost_)
    return;
  scope = {nullptr, true};
  refused_waits handling{"a thread of the actors"};
  for (auto& [scheduler, job] : ready_)
    scheduler->run(job);
  scope.running = false;
}

} // namespace smp
