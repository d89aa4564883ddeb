#pragma once

// The machinery of one rank: what ties modules, messages and actors together.
// A user sees `session`; everything in runtime/ reaches it through this.

#include "actors/host/node.hpp"
#include "actors/board/rank_board.hpp"
#include "actors/stalls/stalls.hpp"
#include "actors/server/microbatch_sequencer.hpp"
#include "actors/board/watched_fabric.hpp"
#include "partition/rank_layout.hpp"
#include "runtime/base/call_context.hpp"
#include "runtime/remote/saved_calls.hpp"
#include "runtime/remote/object_store.hpp"
#include "runtime/base/random_stream.hpp"
#include "runtime/session/session.hpp"
#include "transport/exchange.hpp"

#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <shared_mutex>
#include <string>
#include <vector>

namespace smp {

class call_observer;
class execution;
class model_state;
class promise_book;
struct pipeline_program;
struct schedule_report;

/// What a step runs per microbatch on pp_rank 0.
/// @returns the microbatch's results, encoded (runtime/session/step_result.hpp)
using step_body = std::function<payload(uint64_t microbatch)>;

/// Loads the plug-in of `smp.pipeline = "actor"`, if the session got no
/// schedule otherwise. Before the actor system is made, as plug-ins may bring
/// message types.
/// @throws error (config) naming the key
void load_schedule(session_config& x);

class engine final : public fabric_listener,
                     public std::enable_shared_from_this<engine> {
public:
  struct parts {
    session_config config;
    layout_config layout;
    std::shared_ptr<smp::fabric> fabric;
    std::shared_ptr<actor_host> host;
    std::shared_ptr<execution_token> token;
  };

  explicit engine(parts x);

  ~engine() override;

  // -- life -------------------------------------------------------------------

  /// Connects to the other ranks and starts the actors.
  void start(const std::vector<std::string>& addresses);

  /// All ranks are about to leave: the end of one is no loss from now on.
  void begin_goodbye() noexcept {
    leaving_ = true;
  }

  /// Stops the actors and the fabric. Nothing of this rank runs after it.
  void stop();

  /// Tells that a rank is dead; from then on the session is broken.
  void rank_down(const failure& x);

  /// @throws error if a rank of this run is dead
  void check_alive() const;

  // -- stalls -----------------------------------------------------------------

  /// What this rank executes and waits for.
  rank_board& board() noexcept {
    return *board_;
  }

  /// From now on the calling thread is that of the user, until `detach` on the
  /// same thread.
  void attach_main_thread();

  void detach_main_thread();

  /// How a STALL MONITOR sees this rank; may outlive it.
  watched_rank watch();

  /// Hears each report of a stall, besides stderr. Any thread.
  void on_stall(stall_listener f);

  /// Reports are for others of this process or this terminal to print.
  void keep_stalls_quiet() noexcept {
    prints_stalls_ = false;
  }

  // -- properties -------------------------------------------------------------

  rank_id self() const noexcept {
    return self_;
  }

  uint64_t pp_rank() const noexcept {
    return pp_rank_;
  }

  /// Ranks of the pipeline group by pp_rank.
  const std::vector<rank_id>& pipeline() const noexcept {
    return pipeline_;
  }

  const session_config& config() const noexcept {
    return config_;
  }

  const rank_layout& layout() const noexcept {
    return layout_;
  }

  session* owner() const noexcept {
    return owner_;
  }

  void set_owner(session* x) noexcept {
    owner_ = x;
  }

  smp::fabric& fabric() noexcept {
    return *fabric_;
  }

  smp::exchange& exchange() noexcept {
    return exchange_;
  }

  object_store& objects() noexcept {
    return objects_;
  }

  saved_calls& calls() noexcept {
    return calls_;
  }

  /// What this rank knows of calls that it does not wait for.
  promise_book& promises() noexcept {
    return *promises_;
  }

  node& actors() noexcept {
    return *node_;
  }

  /// Records steps and replays them (R33).
  record_book& records() noexcept {
    return *records_;
  }

  /// Keeps the order of microbatches in modules that change state (R19).
  smp::microbatch_sequencer& sequencer() noexcept {
    return *sequencer_;
  }

  /// The one distributed model of the session, or null.
  const std::shared_ptr<model_state>& model() const noexcept {
    return model_;
  }

  /// @throws error (unsupported) if the session has a model already (R4)
  void set_model(std::shared_ptr<model_state> x);

  void clear_model() noexcept;

  /// Manual placement of modules without a hook of their own, by object.
  std::map<const void*, uint32_t>& pins() noexcept {
    return pins_;
  }

  /// Why modules are stateful, as a user said, by object.
  std::map<const void*, std::string>& stateful() noexcept {
    return stateful_;
  }

  /// Hears of every call that this rank runs; null, the default, for nobody.
  /// Between steps only.
  void observe(call_observer* x) noexcept {
    observer_ = x;
  }

  call_observer* observer() const noexcept {
    return observer_;
  }

  // -- steps ------------------------------------------------------------------

  /// Runs one step on all ranks of the pipeline group: every rank calls this,
  /// `body` runs on pp_rank 0 only.
  /// @param signature of the function and its arguments: steps that differ in
  /// it are recorded apart (R33). Only that of pp_rank 0 counts.
  /// @returns the encoded results by microbatch, the same on every rank
  /// @throws error, the same on every rank (R6)
  std::vector<payload> run_step(uint64_t microbatches, step_body body,
                                uint64_t signature = 0);

  /// Plays the schedule for steps of so many microbatches against the
  /// partition, once for each number: a bad one must not begin a step.
  /// Collective over the pipeline group; needs the model's partition.
  /// @throws error (config), the same on all ranks, naming the first task that
  /// is wrong
  void check_schedule(uint64_t microbatches);

  /// Plays the schedule on a program that need not be that of this session.
  /// @throws error naming the first task that is wrong
  schedule_report play_schedule(const pipeline_program& program,
                                uint64_t microbatches, bool timeline) const;

  /// What the last check found, one line for people; on pp_rank 0.
  const std::string& schedule_text() const noexcept {
    return schedule_text_;
  }

  /// The step that runs or ran last.
  step_id step() const noexcept {
    return step_id{step_.load()};
  }

  const step_stats& last_step() const noexcept {
    return stats_;
  }

  /// Microbatches of the running step.
  uint64_t microbatches() const noexcept {
    return microbatches_;
  }

  /// A result of the step body that this rank holds for others.
  void note_held_result(object_id x) {
    held_results_.push_back(x);
  }

  /// The grant of a microbatch's backward phase. Parks.
  void await_grant(execution& ex);

  // -- called by executor threads -----------------------------------------------------

  /// Runs a request: the step body, or what another rank wants.
  payload execute(execution& ex, request& x);

  /// The stream with which a microbatch begins (R23).
  random_stream initial_stream(step_id s, microbatch_id m) const;

  void add_executing(std::chrono::steady_clock::duration x) noexcept {
    executing_ns_ += static_cast<uint64_t>(
      std::chrono::duration_cast<std::chrono::nanoseconds>(x).count());
  }

  void count_request() noexcept {
    ++requests_;
  }

  void count_wait() noexcept {
    ++waits_;
  }

  // -- fabric_listener --------------------------------------------------------

  void on_message(rank_id from, message x) override;

  void on_peer_lost(const failure& x) override;

private:
  void report_stall(const std::string& text, bool ends);
  rank_view view();
  /// Ends all waits, now and later: the session is of no use afterwards.
  void end_stalled(const failure& x);
  schedule_ptr new_schedule(uint64_t microbatches) const;
  uint64_t active(uint64_t microbatches) const;
  service_order new_order(uint64_t microbatches, size_t pp_rank) const;
  /// Names the record that a step belongs to; on pp_rank 0.
  uint64_t record_key(uint64_t microbatches, uint64_t signature) const;
  /// Lets all ranks replay an order that timing has no part in.
  void compute_order(uint64_t microbatches);
  std::shared_ptr<const user_schedule> make_user_schedule() const;
  /// pp_rank 0 decides for all whether to trace: the ranks need not see the
  /// same, as some read the model's file only when they know what they own.
  bool agree_to_trace();
  /// Measures the modules before the partition.
  void trace(const step_body& body);

  session_config config_;
  rank_layout layout_;
  std::shared_ptr<rank_board> board_;
  std::shared_ptr<watched_fabric> fabric_;
  std::shared_ptr<actor_host> host_;
  std::shared_ptr<execution_token> token_;
  rank_id self_;
  uint64_t pp_rank_ = 0;
  std::vector<rank_id> pipeline_;
  session* owner_ = nullptr;
  smp::exchange exchange_;
  object_store objects_;
  saved_calls calls_;
  std::unique_ptr<promise_book> promises_;
  std::shared_ptr<model_state> model_;
  std::map<const void*, uint32_t> pins_;
  std::map<const void*, std::string> stateful_;
  std::shared_ptr<smp::microbatch_sequencer> sequencer_;
  std::shared_ptr<record_book> records_;
  std::atomic<call_observer*> observer_ = nullptr;
  std::atomic<uint64_t> step_ = 0;
  std::atomic<uint64_t> microbatches_ = 0;
  std::atomic<uint64_t> executing_ns_ = 0;
  std::atomic<uint64_t> requests_ = 0; // of the running step
  std::atomic<uint64_t> waits_ = 0;    // of the running step
  step_body body_;
  call_context body_context_; // of the thread that called the step
  std::vector<object_id> held_results_; // of the running step
  step_stats stats_;
  std::shared_ptr<const user_schedule> user_schedule_;
  std::set<uint64_t> checked_; // numbers of microbatches
  std::string schedule_text_;
  /// By pp_rank; see `service_place`.
  std::vector<std::vector<uint32_t>> chunk_of_;
  mutable std::mutex mutex_;
  failure down_; // guarded by mutex_
  stall_listener on_stall_; // guarded by mutex_
  bool prints_stalls_ = true;
  std::optional<noting_waiter> noting_; // while a thread is attached
  std::optional<scoped_waiter> installed_;
  /// Keeps `node_` while a message is handed over to it.
  std::shared_mutex node_mutex_;
  std::atomic<bool> leaving_ = false;
  std::atomic<bool> stopped_ = false;
  /// Last: its actors may call everything above until they end.
  std::unique_ptr<node> node_;
};

} // namespace smp
