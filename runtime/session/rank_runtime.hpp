#pragma once

// One rank assembled: its stores, its actors, its place in the run. Users see
// `session`; code that runs on the rank sees `rank_context`.

#include "actors/board/rank_board.hpp"
#include "actors/comm/comm_fabric.hpp"
#include "actors/host/node.hpp"
#include "actors/stalls/stalls.hpp"
#include "partition/rank_layout.hpp"
#include "runtime/base/rank_context.hpp"
#include "runtime/calls/object_store.hpp"
#include "runtime/collectives/tensor_peers.hpp"
#include "runtime/config/session_config.hpp"
#include "runtime/execution/saved_calls.hpp"
#include "runtime/offload/offload_store.hpp"
#include "runtime/placement/partitioning.hpp"
#include "runtime/step/schedule_policies.hpp"
#include "runtime/step/step_runner.hpp"
#include "transport/collectives/collectives.hpp"
#include "transport/exchange.hpp"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <string>
#include <vector>

namespace smp {

class model_state;
struct member;

class rank_runtime final : public rank_context,
                           private rank_services,
                           private fabric_listener {
public:
  struct parts {
    session_config config;
    layout_config layout;
    std::shared_ptr<smp::fabric> fabric;
    std::shared_ptr<actor_host> host;
    std::shared_ptr<execution_token> token;
    /// Null: the host.
    std::shared_ptr<rank_device> device = {};
    /// Null: one in memory of its own.
    std::shared_ptr<flight_record> record = {};
  };

  explicit rank_runtime(parts x);

  ~rank_runtime() override;

  // -- life -------------------------------------------------------------------

  /// Records which machine each rank of the run is on.
  /// @returns the addresses of their fabrics. @pre not started
  std::vector<std::string> take_places(const std::vector<member>& all);

  /// Tells the other ranks of the machine how to read the arena of the device.
  /// Which pairs of devices reach each other is agreed on here. Collective;
  /// does nothing on the host.
  void connect_devices();

  /// Connects to the other ranks and starts the actors.
  void start(const std::vector<std::string>& addresses);

  /// All ranks are about to leave: a rank that ends is no longer a loss.
  void begin_goodbye() noexcept {
    leaving_ = true;
  }

  /// Stops the actors and the fabric. No code of this rank runs afterwards.
  void stop();

  /// Reports that a rank is dead; from then on the session is broken.
  void rank_down(const failure& x);

  /// @throws error if a rank of this run is dead
  void check_alive() const;

  void set_owner(session* x) noexcept {
    owner_ = x;
  }

  // -- stalls (stalls.cpp) ----------------------------------------------------

  /// Makes the calling thread the user's thread, until `detach_main_thread` is
  /// called on the same thread.
  void attach_main_thread();

  void detach_main_thread();

  /// The view of this rank for a STALL MONITOR; may outlive the rank.
  watched_rank watch();

  using inspection_opener = std::function<std::optional<inspection_entry>()>;

  /// Sets the function that opens the run for inspection by clients.
  void on_inspection(inspection_opener f) {
    open_inspection_ = std::move(f);
  }

  /// @returns where clients may connect; nullopt if another process tells them.
  std::optional<inspection_entry> open_inspection() const {
    return open_inspection_ ? open_inspection_() : std::nullopt;
  }

  /// Calls `f` for each stall report, besides stderr. On any thread.
  void on_stall(stall_listener f);

  /// Traces and the partition go to this folder; see `session::run_dir`.
  void write_to(const std::string& run_dir);

  /// Empty: there is no such folder.
  const std::string& run_dir() const noexcept {
    return run_dir_;
  }

  /// At a stall, and by `leave_record`, what this rank did last is written to
  /// this folder.
  void leave_record_in(std::string dir);

  /// Does nothing without a folder.
  void leave_record();

  /// Suppresses reports: another rank of this process or terminal prints them.
  void keep_stalls_quiet() noexcept {
    prints_stalls_ = false;
  }

  // -- parts ------------------------------------------------------------------

  smp::fabric& fabric() noexcept {
    return *fabric_;
  }

  /// Counters and held state of the communication stages; never waits.
  comm_report communication() const {
    return fabric_->status();
  }

  node& actors() noexcept {
    return *node_;
  }

  step_runner& steps() noexcept {
    return steps_;
  }

  const schedule_policies& policies() const noexcept {
    return policies_;
  }

  /// The user's settings for modules.
  module_marks& marks() noexcept {
    return marks_;
  }

  /// The same, for a setting that the user makes for `module` with `function`.
  /// @throws error (unsupported) if its model is partitioned: too late
  module_marks& marks_for(const void* module, const std::string& function);

  /// Creates the only distributed model of the session.
  /// @throws error (unsupported) if the session has one already (R4)
  std::shared_ptr<model_state> make_model(model_root root);

  void drop_model() noexcept;

  /// The distributed model of the session, or null.
  const std::shared_ptr<model_state>& state() const noexcept {
    return state_;
  }

  /// See `step_runner::run_step`.
  std::vector<payload> run_step(const step_call& x, step_body body);

  /// See `step_runner::skip_step`.
  void skip_step();

  /// Reports every call that this rank runs to `x`; null: none. Between steps
  /// only.
  void observe(call_observer* x) noexcept {
    observer_ = x;
  }

private:
  server_options options_of_server();
  void report_stall(const std::string& text, bool ends);
  /// @param limit how long the actors of the rank may take to reply
  rank_view view(std::chrono::milliseconds limit);
  rank_status status();
  /// Fails all waits, present and future: the session is unusable afterwards.
  void end_stalled(const failure& x);

  // -- rank_services ----------------------------------------------------------

  std::shared_ptr<executor> make_executor() override;
  schedule_ptr make_schedule(uint64_t microbatches) override;
  service_order make_order(uint64_t microbatches) override;
  std::vector<module_id> ordered_modules(const request& x) override;
  completion_ptr gather(const request& x) override;
  rank_id awaited_by(const request& x) override;
  std::string module_name(module_id x) override;
  void step_failed(step_id step, const failure& why) override;
  void microbatch_over(step_id step, microbatch_id x) override;
  void forward_over(step_id step, uint64_t start_number) override;
  void step_over(step_id x) override;

  // -- fabric_listener --------------------------------------------------------

  void on_message(rank_id from, message x) override;

  void on_peer_lost(const failure& x) override;

  session_config own_config_;
  rank_layout own_layout_;
  std::vector<std::string> host_of_;        // by rank; empty: one machine
  std::shared_ptr<rank_device> own_device_; // null: the host
  std::shared_ptr<rank_board> own_board_;
  std::shared_ptr<comm_fabric> fabric_;
  std::shared_ptr<actor_host> host_;
  std::shared_ptr<execution_token> token_;
  smp::exchange own_exchange_;
  smp::collectives own_collectives_;
  smp::tensor_peers own_tensor_peers_;
  object_store own_objects_;
  saved_calls own_calls_;
  std::shared_ptr<offload_store> own_offload_; // null: no offload
  std::shared_ptr<microbatch_sequencer> own_sequencer_;
  std::shared_ptr<order_book> own_records_;
  schedule_policies policies_;
  step_runner steps_;
  module_marks marks_;
  std::shared_ptr<model_state> state_;
  mutable std::mutex mutex_;
  failure down_;            // guarded by mutex_
  failure told_;            // first from SUPERVISOR; guarded by mutex_
  stall_listener on_stall_; // guarded by mutex_
  std::string run_dir_;
  std::string record_dir_; // guarded by mutex_; empty: none
  std::condition_variable told_loss_;
  bool prints_stalls_ = true;
  inspection_opener open_inspection_;
  std::optional<noting_waiter> noting_; // while a thread is attached
  std::optional<scoped_waiter> installed_;
  /// Keeps `node_` alive while it is asked or told something.
  std::shared_mutex node_mutex_;
  std::atomic<bool> leaving_ = false;
  std::atomic<bool> stopped_ = false;
  /// Last member: its actors may call everything above until they end.
  std::unique_ptr<node> node_;
};

/// For callbacks that may outlive the rank.
std::weak_ptr<rank_runtime> weak_from(rank_runtime& x);

} // namespace smp
