#pragma once

#include "actors/actors.hpp"
#include "actors/node.hpp"
#include "actors/server_core.hpp"

#include <caf/stateful_actor.hpp>

#include <functional>
#include <map>
#include <optional>
#include <vector>

namespace smp {

/// What a MODULE SERVER is built from.
struct server_config {
  node_options node;
  /// Hears the end of each step, once. Any thread; must not block.
  std::function<void(step_report)> on_step_over;
};

struct module_server_state : server_output {
  static inline const char* name = "smp.module-server";

  using pointer = module_server_actor::stateful_pointer<module_server_state>;

  explicit module_server_state(pointer self) : self(self) {
    // nop
  }

  /// Ends the other actors of the rank, also when the SERVER was killed.
  ~module_server_state() override;

  // -- server_output ----------------------------------------------------------

  void start(context_id ctx, request x) override;
  void resume(context_id ctx, response x) override;
  void ask(rank_id owner, request x) override;
  void answer(response x) override;
  void forward_done(const smp::forward_done& x) override;
  void run(const run_step& x) override;
  void failed(const step_failed& x) override;
  void watch(request_id id, const completion_ptr& x) override;
  void microbatch_over(const microbatch_done& x) override;
  void step_over(step_report x) override;

  // -- events -----------------------------------------------------------------

  void enter(const run_step& x);

  /// A context or the SCHEDULER died.
  void on_down(const caf::down_msg& x);

  /// The rank shuts down: cancels what runs, then ends the other actors.
  void on_exit(const caf::exit_msg& x);

  /// A shutdown goes on once nothing executes.
  void settle();

  // -- helpers ----------------------------------------------------------------

  /// Sends the same to all other ranks of the pipeline, from pp_rank 0.
  template <class T>
  void broadcast(const T& x);

  server_status status() const;

  pointer self;
  server_config config;
  std::optional<server_core> core;
  std::map<context_id, worker_context_actor> contexts;
  pipeline_scheduler_actor scheduler;
  bool closing = false;
  caf::error reason;
};

module_server_actor::behavior_type
module_server(module_server_state::pointer self, server_config config);

/// The way of messages from the fabric to the MODULE SERVER: reads them on the
/// thread of the fabric.
struct server_inbox {
  module_server_actor server;
  rank_id self;
  /// pp_rank 0, who alone may end microbatches and steps.
  rank_id leader;

  void deliver(rank_id from, message x) const;
};

} // namespace smp
