#pragma once

#include "actors/server/executor.hpp"
#include "runtime/base/here.hpp"
#include "runtime/execution/running_call.hpp"
#include "transport/fabric.hpp"
#include "transport/wait.hpp"
#include "transport/wake_up.hpp"

#include <ATen/ThreadLocalState.h>

#include <chrono>
#include <optional>
#include <thread>

namespace smp {

class step_runner;

/// Runs requests on a thread that parks at every call (R24). All of autograd's
/// thread-local state stays on that thread, so a backward that waits for
/// another rank keeps its stack.
class executor_thread final : public executor, public waiter {
public:
  /// All of them outlive this.
  executor_thread(const rank_context& rank, fabric& messages,
                  const step_runner& steps);

  ~executor_thread() override;

  // -- waiter (own thread) ----------------------------------------------------

  void wait(const completion_ptr& x, const wait_reason& why) override;

private:
  // -- executor ---------------------------------------------------------------

  void wake() override;
  void join() override;
  void begin_call(call_kind what, std::optional<rank_id> from) override;
  void switch_out() override;
  void pause() override;
  void switch_in(const failure& why) override;

  // -- own thread -------------------------------------------------------------

  void run();
  outcome execute(request x);
  /// Runs the step body, or a request of another rank.
  /// @returns the body of the response
  /// @throws any exception of the user's code
  payload answer(const request& x);
  /// @returns the path of the module whose code threw; empty: the step body
  std::string failed_module() const;
  failure cancelled() const;
  void set_aside();
  void take_back();
  void begin_span();

  const rank_context& rank_;
  fabric& messages_;
  const step_runner& steps_;
  running_call call_;
  std::chrono::steady_clock::time_point since_;
  /// What belongs to the execution while its thread serves others.
  here here_;
  std::optional<at::ThreadLocalStateGuard> plain_;
  /// A counting wake-up: the end may arrive before the last one is consumed.
  pollable_wake_up wake_;
  std::thread thread_;
};

} // namespace smp
