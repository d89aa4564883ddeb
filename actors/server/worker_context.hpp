#pragma once

#include "actors/board/context_notes.hpp"
#include "actors/protocol/actors.hpp"
#include "actors/protocol/rank_services.hpp"

#include <caf/stateful_actor.hpp>

#include <memory>
#include <mutex>

namespace smp {

/// Connects a MODULE SERVER and the executor of a WORKER CONTEXT, for the life
/// of the context. Notes each change of state. Thread-safe.
class context_link final : public executor_listener {
public:
  /// Makes the executor.
  /// @param notes where this context notes its state
  /// @param server receives the executor's events; its system must outlive this
  context_link(std::shared_ptr<context_notes> notes, module_server_actor server,
               rank_services& services);

  /// Starts a request (IDLE -> EXECUTING).
  /// @returns an error if the context is in another state
  /// @throws whatever the executor throws, which is a defect of the executor
  caf::error start(request x);

  /// Resumes after a call (PENDING -> EXECUTING). Errors as for `start`.
  caf::error resume(response x);

  /// Unwinds what runs and joins its thread; starts nothing any more.
  void close();

  const context_notes& notes() const noexcept {
    return *notes_;
  }

  // -- executor_listener ------------------------------------------------------
  // The SERVER may run on the calling thread before these return: when an
  // execution parks or ends, its thread has nothing else to do.

  /// EXECUTING -> PENDING
  void called(call x) override;

  /// EXECUTING
  void asked(call x) override;

  /// EXECUTING -> IDLE
  void returned(outcome x) override;

private:
  caf::error refusal() const;

  void give_up();

  context_notes::clock::time_point now() const;

  template <class T>
  void tell(T x);

  std::shared_ptr<context_notes> notes_;
  module_server_actor server_;
  std::mutex mutex_; // guards exec_
  executor_ptr exec_;
};

/// Holds one execution; replies at any time with its state.
struct worker_context_state {
  static inline const char* name = "smp.worker-context";

  using pointer = worker_context_actor::stateful_pointer<worker_context_state>;

  explicit worker_context_state(pointer self) : self(self) {
    // nop
  }

  ~worker_context_state();

  context_status status() const;

  pointer self;
  std::shared_ptr<context_link> link;
};

worker_context_actor::behavior_type
worker_context(worker_context_state::pointer self,
               std::shared_ptr<context_link> link);

} // namespace smp
