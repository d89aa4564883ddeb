#pragma once

#include "actors/protocol/server_status.hpp"
#include "actors/server/server_core.hpp"
#include "actors/server/server_options.hpp"
#include "actors/server/worker_context.hpp"

#include <caf/send.hpp>
#include <caf/stateful_actor.hpp>

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace smp {

/// Fabrics and completions may keep callbacks for any time, but no actor handle
/// may outlive its actor system. So callbacks hold this object, and the SERVER
/// closes it when it ends. Thread-safe.
class server_door {
public:
  explicit server_door(module_server_actor hdl) : hdl_(std::move(hdl)) {
    // nop
  }

  /// Sends `x` to the SERVER if that is still alive.
  template <class T>
  void send(T x) {
    std::lock_guard guard{mutex_};
    if (hdl_)
      caf::anon_send(hdl_, std::move(x));
  }

  void close() {
    std::lock_guard guard{mutex_};
    hdl_ = nullptr;
  }

private:
  std::mutex mutex_;
  module_server_actor hdl_;
};

struct module_server_state : server_output {
  static inline const char* name = "smp.module-server";

  using pointer = module_server_actor::stateful_pointer<module_server_state>;

  explicit module_server_state(pointer self);

  /// Ends the other actors of the rank, even if the SERVER was killed.
  ~module_server_state() override;

  // -- server_output ----------------------------------------------------------
  // The core updates the board before it calls these.

  std::shared_ptr<executor> make_context(context_id ctx) override;
  void crashed(context_id ctx, const std::exception_ptr& why) override;
  fabric::sent_callback on_asked(request_id id) override;
  fabric::sent_callback on_answered(request_id id) override;
  void body_over(response x) override;
  void forward_done(const smp::forward_done& x) override;
  void run(const scheduled_step& x) override;
  void planned(const step_plan& x) override;
  void diverged(const step_diverged& x) override;
  void failed(const step_failed& x) override;
  void report_done(request_id id, const completion_ptr& x) override;
  bool gather(const request& x) override;
  void forward_over(const smp::forward_over& x) override;
  void microbatch_over(const microbatch_done& x) override;
  void activity(bool busy) override;
  void step_over(step_report x) override;

  // -- events -----------------------------------------------------------------

  void init(server_options x, std::function<void(step_report)> f);

  void enter(const run_step& x);

  /// A message of another rank.
  void take(rank_id from, message x);

  // What other ranks send, or actors of this one.
  void handle(request& x);
  void handle(response& x);
  void handle(const rank_report& x);
  void handle(const step_plan& x);
  void handle(const step_diverged& x);
  void handle(const step_failed& x);
  // Events of the SCHEDULER, which go on to all ranks, or of pp_rank 0.
  void handle(const smp::forward_over& x);
  void handle(const microbatch_done& x);
  void handle(step_report& x);

  /// A context or the SCHEDULER died.
  void on_down(const caf::down_msg& x);

  /// The rank shuts down: cancels running work, then ends the other actors.
  void on_exit(const caf::exit_msg& x);

  /// A message that has no handler is a defect.
  void on_refused(const std::string& why);

  /// Continues a shutdown once nothing executes.
  void settle();

  // -- helpers ----------------------------------------------------------------

  /// @throws error (protocol) if `from` may not send such a message
  template <class T>
  void check_sender(rank_id from, const T& x) const;

  /// From pp_rank 0: sends `x` to all other ranks of the pipeline.
  template <class T>
  void broadcast(const T& x);

  /// Sends `x` to first ranks of pipelines that share modules with this one.
  template <class T>
  void tell_tied(const T& x);

  server_status status() const;

  pointer self;
  std::shared_ptr<server_door> door;
  server_options options;
  std::function<void(step_report)> on_report;
  std::optional<server_core> core;
  std::map<context_id, worker_context_actor> contexts;
  pipeline_scheduler_actor scheduler;
  uint64_t memory_at_begin = 0; // of the step, bytes
  bool closing = false;
  caf::error reason;
};

/// @param on_report called once at the end of each step; any thread, must not
///        block
module_server_actor::behavior_type
module_server(module_server_state::pointer self, server_options options,
              std::function<void(step_report)> on_report);

} // namespace smp
