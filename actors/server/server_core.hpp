#pragma once

// The logic of a MODULE SERVER, without actors: which request executes next,
// what each execution waits for, and how a step ends.

#include "actors/board/rank_board.hpp"
#include "actors/order/order_book.hpp"
#include "actors/order/step_recorder.hpp"
#include "actors/order/step_replay.hpp"
#include "actors/protocol/messages.hpp"
#include "actors/protocol/rank_services.hpp"
#include "actors/protocol/server_output.hpp"
#include "actors/server/execution_token.hpp"
#include "actors/server/executor.hpp"
#include "actors/server/microbatch_sequencer.hpp"

#include <array>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <variant>
#include <vector>

namespace smp {

/// A rank serves many microbatches with one execution at a time, and must
/// neither lose a request nor wait forever, whatever fails. This class decides
/// all of that: the step gate (R1), the ready queue, the token, and the only
/// way out of PENDING: grants, values, errors and cancellations are all
/// responses, matched by request id.
///
/// The first failure of a step ends it: queued requests are answered with it,
/// grants and waits end with it, but remote work in flight is still awaited.
/// After the death of a rank no remote work is awaited.
class server_core {
public:
  struct options {
    rank_id self;
    /// This is pp_rank 0: it runs the microbatches.
    bool leader = false;
    /// Sends requests and responses. Must outlive the core.
    smp::fabric& fabric;
    /// Must outlive the core.
    rank_services& services;
    /// The stall search must see who has the token, who was answered, and that
    /// anything happened at all: the core writes it here. Must outlive the
    /// core.
    rank_board& board;
    std::shared_ptr<execution_token> token;
    /// Called when the token arrives later; must lead to `token_granted`.
    std::function<void()> on_token;
    /// Null: no module is ordered. Its `on_moved` must lead to `turns_moved`.
    std::shared_ptr<smp::microbatch_sequencer> sequencer = {};
    /// See `server_options::launch_ahead`: each `suspend` and `finish` is
    /// followed by a `reached`.
    uint64_t launch_ahead = 0;
    /// Null or inactive: steps are neither recorded nor replayed.
    std::shared_ptr<order_book> records = {};
  };

  server_core(options x, server_output& output);
  ~server_core();
  server_core(const server_core&) = delete;
  server_core& operator=(const server_core&) = delete;

  // -- steps ------------------------------------------------------------------

  /// Opens the gate: requests that waited for this step become ready. If steps
  /// are recorded, it opens when the plan of pp_rank 0 has arrived too.
  /// @throws error (internal) unless it is later than all steps before and no
  /// step is running
  void enter(const run_step& x);

  /// The decision of pp_rank 0 whether to record or replay a step.
  void plan(const step_plan& x);

  /// Another rank saw the step diverge from its record.
  void diverge(const step_diverged& x);

  /// The forward phase of a microbatch ended everywhere.
  void end_forward(const forward_over& x);

  /// A microbatch ended everywhere.
  void end_microbatch(const microbatch_done& x);

  /// Another rank, or the SCHEDULER, saw the step fail.
  void fail_step(const step_failed& x);

  /// The step ended; the report is kept until this rank has entered the step.
  void end_step(step_report x);

  /// Cancels all that runs; nothing is served any more.
  void shut_down();

  // -- messages ---------------------------------------------------------------

  void receive(request x);

  /// Counts the response if no call waits for it.
  void receive(response x);

  void complete(const completed& x);

  /// Sends the failure instead.
  void answer_undelivered(const undelivered& x);

  /// Fails everything that waits, the running step, and all later ones.
  void rank_down(const failure& x);

  void token_granted();

  /// The device did what an execution launched. May be told before the
  /// execution returned its token.
  void reached();

  /// Held requests may have their turn now.
  void turns_moved();

  /// The SCHEDULER has handled the `forward_done` with this id; its grant, if
  /// there was one, arrived before.
  void decided(request_id x);

  // -- contexts ---------------------------------------------------------------
  // Late messages of a context that was lost are ignored; they are not errors.

  /// A context sent the promise `x` and continues.
  void issue(context_id ctx, call x);

  /// A context parked: frees the token and registers the call.
  void suspend(context_id ctx, call x);

  /// A context is idle: frees the token and answers the request.
  void finish(context_id ctx, outcome x);

  /// A context died: frees its token and fails its request.
  void lose(context_id ctx, const std::string& why);

  // -- properties -------------------------------------------------------------

  rank_id self() const noexcept {
    return options_.self;
  }

  step_id step() const noexcept {
    return current_.step;
  }

  bool in_step() const noexcept {
    return open_ || report_.has_value() || entering_.has_value();
  }

  /// Contexts that are not idle.
  size_t num_busy() const noexcept;

  size_t num_contexts() const noexcept {
    return contexts_.size();
  }

  size_t num_ready() const noexcept {
    return ready_.size();
  }

  size_t num_later() const noexcept {
    return later_.size();
  }

  size_t num_held() const noexcept {
    return held_.size();
  }

  size_t num_blocked() const noexcept {
    return blocked_.size();
  }

  /// Tells whether work here waits for another rank to release the token.
  bool in_line() const noexcept {
    return hold_ == hold::in_line;
  }

  /// Calls `f(request, why, whether objects are missing, whether its step has
  /// not begun)` for each request that has no context yet.
  template <class F>
  void each_queued(F f) const {
    for (auto& x : ready_)
      if (auto* y = std::get_if<request>(&x.work))
        f(*y,
          waits_for_device()    ? "waits for the device"
          : hold_ == hold::none ? "waits for its place in the record"
                                : "waits for the execution token",
          false, false);
    for (auto& x : held_)
      f(x.what, "waits for the turn of its microbatch", false, false);
    for (auto& x : blocked_)
      f(x.what,
        x.incomplete ? "waits for its arguments"
                     : "waits for an earlier request of its caller",
        x.incomplete, false);
    for (auto& x : later_)
      f(x, "waits until this rank begins the step", false, true);
  }

  /// Tells whether other ranks must hear when forward phases end.
  bool keeps_order() const {
    return options_.sequencer && options_.sequencer->used();
  }

  /// Executions that only the device still works for.
  uint64_t num_launched() const noexcept {
    return launched_ > 0 ? static_cast<uint64_t>(launched_) : 0;
  }

  size_t num_pending() const noexcept {
    return pending_.size();
  }

  uint64_t num_dropped() const noexcept {
    return dropped_;
  }

  uint64_t num_unknown() const noexcept {
    return unknown_;
  }

private:
  struct context_entry {
    std::shared_ptr<executor> code;
    /// The request it serves, without its body, which the executor has. Empty:
    /// the context is free.
    std::optional<request> current;
    /// Ordered modules that its execution has entered.
    std::vector<module_id> entered;
    /// By owner: the last promise that it sent there.
    std::map<rank_id, uint64_t> promises;
  };

  struct pending_call {
    context_id context;
    call_kind kind = call_kind::remote;
    phase what = phase::forward;
    /// Set for a promise: its response wakes no context.
    std::shared_ptr<awaited<response>> answer = {};
    /// It resumes in its turn.
    bool in_order = true;
  };

  /// A new request has no context yet; a response belongs to one.
  struct ready_item {
    ready_key key;
    std::vector<module_id> entered = {};
    std::optional<context_id> context;
    std::variant<request, response> work;
    /// The context's wait has no place in a recorded order.
    bool after_wait = false;
  };

  /// Messages about a step that this rank has not entered yet.
  struct early_news {
    failure failed;
    std::optional<step_report> done;
    std::vector<forward_over> forwards;
    std::optional<step_plan> plan;
    std::optional<step_diverged> diverged;
  };

  using ready_list = std::vector<ready_item>;

  using pending_map = std::map<request_id, pending_call>;

  void begin(run_step x);
  void prepare(const std::optional<step_plan>& plan);
  scheduled_step admission() const;
  void end_record(bool complete);
  /// Tells whether this rank follows the record.
  bool following() const {
    return replay_ && !replay_->diverged();
  }
  failure leave_record(const request& at, const std::string& how);
  /// More would queue on the device in front of what is more urgent later.
  bool waits_for_device() const {
    return options_.launch_ahead > 0 && num_launched() >= options_.launch_ahead;
  }
  void drop_record(const step_diverged& x);

  void accept(request x);
  ready_key key_of(phase what, microbatch_id x);

  /// A request that arrived before its turn: it has neither context nor token.
  struct held_request {
    request what;
    std::vector<module_id> modules;
  };

  /// A request that may not start yet: it has neither context nor token.
  struct blocked_request {
    request what;
    bool behind = false;     // another request of its origin comes first
    bool incomplete = false; // objects are missing
  };

  bool is_over(rank_id origin, uint64_t number) const;
  void unblock(std::vector<blocked_request>::iterator i);
  bool complete_blocked(const completed& x);
  void end_promised(request_id id);
  void admit(request x);
  void admit_in_turn(held_request x);
  failure refusal(const call& x) const;
  failure refusal(const pending_call& asked) const;
  request request_of(const context_entry& from, uint64_t number, call& x) const;
  void push(request x, std::vector<module_id> entered);
  void push(const pending_call& x, response y);
  void settle(pending_map::iterator i, response x);
  void fail(const failure& x);
  void close(step_report x);
  void answer_queued(const failure& x);
  template <class Predicate>
  void cancel_pending(const failure& x, Predicate pred);
  void reply(response x);
  void answer(response x);
  void check_over();
  void pump();
  void serve_next();
  template <class F>
  void hand_over(context_id ctx, F f);
  ready_list::iterator next_item();
  void note_served(const ready_item& x);
  void free_token(context_id ctx);
  context_id idle_context();

  enum class hold : uint8_t { none, in_line, held };

  // What happened, for readers after the fact.
  void note(flight_kind kind, const request& x, rank_id peer = no_rank,
            uint64_t bytes = 0, context_id ctx = {});
  void note_arrival(const request& x);
  void note_reply(const pending_call& of, const response& x);
  void note_answer(const response& x);
  void note_failure();
  void ask(context_id ctx, rank_id owner, request x);

  /// @returns where to send what counts as progress of the rank
  server_output& noted() {
    options_.board.note();
    return output_;
  }

  options options_;
  server_output& output_;
  execution_token::seat seat_;
  hold hold_ = hold::none;
  std::optional<context_id> executing_;
  /// Executions whose work the device has not done; below 0, it was faster.
  int64_t launched_ = 0;

  run_step current_;
  step_id next_;                     // the first step that may still be entered
  std::optional<run_step> entering_; // waits for its plan
  std::optional<step_plan> plan_;    // of the current step
  std::optional<step_recorder> recorder_;
  std::optional<step_replay> replay_;
  bool open_ = false;
  bool busy_ = false; // as last told to `activity`
  bool closing_ = false;
  /// `forward_done` messages that the SCHEDULER has not handled yet.
  std::set<request_id> undecided_;
  failure failed_;                    // of the current step
  std::optional<step_report> report_; // over, but contexts still unwind
  std::vector<bool> ended_;           // by microbatch
  service_order order_ = backward_first;
  std::vector<std::array<uint64_t, 2>> segments_; // by microbatch and phase
  std::map<step_id, early_news> early_;

  ready_list ready_;
  std::vector<request> later_;
  std::vector<held_request> held_;
  std::vector<blocked_request> blocked_;
  std::set<request_id> over_; // promised requests of this step that ended
  std::map<context_id, context_entry> contexts_;
  pending_map pending_;
  std::set<rank_id> dead_;
  failure down_; // the first death

  uint64_t arrivals_ = 0;
  uint32_t calls_ = 0; // of the current step
  uint64_t dropped_ = 0;
  uint64_t unknown_ = 0;
  /// The context that became idle last: its thread is still awake.
  std::optional<context_id> warm_;
  uint64_t last_context_ = 0;
};

} // namespace smp
