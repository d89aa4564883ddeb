#pragma once

#include "actors/protocol/executor.hpp"
#include "runtime/remote/execution.hpp"
#include "transport/wait.hpp"

#include <atomic>
#include <chrono>
#include <semaphore>
#include <thread>

namespace smp {

/// Runs requests on a executor thread that parks on a semaphore at every call
/// (R24). All of autograd's thread-local state stays on that thread, so a
/// backward that waits for another rank keeps its stack.
class executor_thread final : public executor, public execution, public waiter {
public:
  executor_thread(executor_listener& listener, engine& eng);

  ~executor_thread() override;

  // -- executor (pool thread) -------------------------------------------------

  void start(request x) override;

  void resume(response x) override;

  // -- execution and waiter (executor thread) ----------------------------------

  response park(call x) override;

  void send(call x) override;

  void wait(const completion_ptr& x, const wait_reason& why) override;

private:
  void run();
  void check_going() const;
  outcome execute(request x);
  void switch_in();
  void switch_out();

  executor_listener& listener_;
  request request_;
  response response_;
  std::chrono::steady_clock::time_point since_;
  /// The microbatch's stream while another one, or none, executes.
  random_stream stream_;
  std::atomic<bool> stopping_ = false;
  /// Counting: the stop may come on top of a wake-up not consumed yet.
  std::counting_semaphore<> wake_{0};
  std::thread thread_;
};

} // namespace smp
