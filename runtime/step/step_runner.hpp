#pragma once

#include "actors/protocol/request.hpp"
#include "runtime/base/call_context.hpp"
#include "runtime/base/rank_context.hpp"
#include "runtime/step/replicas.hpp"
#include "runtime/step/step_call.hpp"
#include "runtime/step/step_stats.hpp"
#include "runtime/step/trace_recorder.hpp"

#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <utility>
#include <vector>

namespace smp {

class execution_token;
class fabric;
class model_state;
class node;
class running_call;
class schedule_policies;

/// The work of a step per microbatch on pp_rank 0.
/// @returns the microbatch's results, encoded (runtime/step/step_result.hpp)
using step_body = std::function<payload(uint64_t microbatch)>;

/// Runs the steps of one rank, one at a time, and on pp_rank 0 their bodies.
class step_runner final {
public:
  /// All of them outlive this.
  step_runner(const rank_context& rank, const schedule_policies& policies,
              const smp::fabric& fabric, execution_token& token)
    : rank_(rank),
      policies_(policies),
      fabric_(fabric),
      token_(token),
      replicas_(rank),
      traces_(rank) {
    // nop
  }

  /// Runs one step on all ranks of the pipeline group: every rank calls this,
  /// `body` runs on pp_rank 0 only. Replicas run it at the same time, and
  /// average their gradients at its end.
  /// @param model may be null
  /// @returns the encoded results by microbatch, the same on every rank of the
  /// pipeline group
  /// @throws error, the same on every rank of the pipeline group (R6)
  std::vector<payload> run_step(node& actors, model_state* model,
                                const step_call& x, step_body body);

  /// Takes part in a step of other replicas without running anything: uneven
  /// inputs. Call on every rank of the pipeline group, and on all pipelines
  /// that share modules with it.
  /// @param model may be null
  /// @throws error, as `run_step`
  void skip_step(model_state* model);

  /// See `replicas::leave`.
  void leave() {
    traces_.finish();
    replicas_.leave();
  }

  /// The next step is the `x`-th of the run. Once a step was numbered, others
  /// are not counted: evaluations. Without, all steps are counted.
  void number_step(uint64_t x) noexcept {
    number_ = x;
    numbered_ = true;
  }

  /// See `trace_recorder::write_to`.
  void write_traces_to(std::string dir) {
    traces_.write_to(std::move(dir));
  }

  const step_stats& last_step() const noexcept {
    return stats_;
  }

  /// Calls `f` when a step begins (true), and when it has succeeded (false).
  void on_step(std::function<void(bool)> f) {
    on_step_ = std::move(f);
  }

  // -- executors --------------------------------------------------------------

  /// Runs the step body for the microbatch of `ex`.
  payload run_body(running_call& ex) const;

  /// @throws error (unsupported) if a tensor changed although microbatches pass
  /// its modules in any order (R19)
  void check_order() const;

private:
  /// @returns the number of the step that begins, for users; 0: it has none
  uint64_t take_number();
  void prepare(model_state& model, uint64_t microbatches,
               const step_body& body);
  void trace(model_state& model, const step_body& body);
  /// @param again see `model_state::begin_step`
  step_report run_once(node& actors, model_state* model, const step_call& x,
                       bool again);
  failure skipped_by_some(bool skips) const;
  std::set<uint32_t> late_changes() const;
  bool runs_again(model_state* model, const step_call& call,
                  const replicas::verdict& heard) const;
  void take_back(model_state& model, const step_call& x, const failure& why);
  void end_step(model_state* model, const failure& why);
  step_report run_actors(node& actors, uint64_t microbatches);
  /// The outcome for all pipelines that share modules: they run steps together.
  failure shared_outcome(const failure& mine) const;
  /// @param learnt calls that waited in this step will not wait in later ones
  void note_record(const model_state* model, uint64_t microbatches,
                   double seconds, bool learnt);
  static size_t warm_up(const model_state* model, uint64_t microbatches);
  uint64_t record_key(const model_state* model, uint64_t microbatches,
                      uint64_t signature) const;
  void agree_on_record() const;
  void order_if_recorded(model_state* model, uint64_t microbatches);
  void compute_order(const model_state* model, uint64_t microbatches,
                     bool learnt);

  const rank_context& rank_;
  const schedule_policies& policies_;
  const smp::fabric& fabric_;
  execution_token& token_;
  replicas replicas_;
  trace_recorder traces_;
  uint64_t number_ = 0;
  bool numbered_ = false;
  step_body body_;
  call_context body_context_; // of the thread that called the step
  step_stats stats_;
  bool told_of_divergence_ = false;
  std::function<void(bool)> on_step_;
};

/// @param drawn_step see `step_counters`
/// @returns the seed of a microbatch's random numbers (R23)
uint64_t seed_of(const rank_context& rank, uint64_t drawn_step,
                 microbatch_id m);

/// Waits until the microbatch of `ex` may begin its backward phase. Parks.
void await_grant(running_call& ex);

} // namespace smp
