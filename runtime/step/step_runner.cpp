#include "runtime/step/step_runner.hpp"

#include "actors/board/rank_board.hpp"
#include "actors/host/node.hpp"
#include "actors/order/order_book.hpp"
#include "actors/server/execution_token.hpp"
#include "actors/server/executor.hpp"
#include "actors/server/microbatch_sequencer.hpp"
#include "partition/rank_layout.hpp"
#include "runtime/base/fault.hpp"
#include "runtime/base/print_stderr.hpp"
#include "runtime/calls/object_store.hpp"
#include "runtime/calls/parameters.hpp"
#include "runtime/calls/promised_call.hpp"
#include "runtime/collectives/agreement.hpp"
#include "runtime/collectives/data_group.hpp"
#include "runtime/config/session_config.hpp"
#include "runtime/device/rank_device.hpp"
#include "runtime/execution/device_failure.hpp"
#include "runtime/execution/saved_calls.hpp"
#include "runtime/intercept/call_observer.hpp"
#include "runtime/intercept/sequential.hpp"
#include "runtime/offload/offload_store.hpp"
#include "runtime/step/model_state.hpp"
#include "runtime/step/schedule_policies.hpp"
#include "transport/bytes.hpp"
#include "transport/container_bytes.hpp"
#include "transport/exchange.hpp"
#include "transport/wake_up.hpp"

#include <algorithm>
#include <chrono>
#include <utility>

namespace smp {

// -- one step -----------------------------------------------------------------

namespace {

constexpr int most_reruns = 4; // of a step

offload_store::counts offload_counts(const rank_context& rank) {
  auto* store = rank.offload();
  return store ? store->status() : offload_store::counts{};
}

/// Clears the end-of-step state of the board when the step is over.
struct step_end_mark {
  ~step_end_mark() {
    board.main_ends_step(false);
  }

  rank_board& board;
};

/// Notes when the step begins and ends, for readers after the fact.
class noted_step {
public:
  noted_step(const rank_context& rank, uint64_t number)
    : rank_(rank), number_(number) {
    note(flight_kind::step_begins);
  }

  ~noted_step() {
    note(flight_kind::step_ends);
  }

  noted_step(const noted_step&) = delete;
  noted_step& operator=(const noted_step&) = delete;

private:
  void note(flight_kind kind) {
    flight_event x;
    x.kind = kind;
    x.step = static_cast<uint32_t>(number_);
    rank_.board().record().note(x);
    trace_memory(rank_);
  }

  const rank_context& rank_;
  const uint64_t number_;
};

} // namespace

std::vector<payload> step_runner::run_step(node& actors, model_state* model,
                                           const step_call& x, step_body body) {
  if (running_call::current())
    throw error{error_code::unsupported, "a step inside a step"};
  const auto number = take_number();
  traces_.before(number);
  if (on_step_)
    on_step_(true);
  auto microbatches = x.microbatches;
  if (model)
    prepare(*model, microbatches, body);
  if (model && model->partitioned() && traces_.wants_plan())
    traces_.plan(policies_.play(model->program(), microbatches, true));
  stats_ = {};
  // Once per step: a rerun draws the same numbers.
  ++rank_.counters().drawn_step;
  std::optional<noted_step> noted{std::in_place, rank_, number};
  auto begin = std::chrono::steady_clock::now();
  auto sent = fabric_.stats().bytes_sent;
  auto offloaded = offload_counts(rank_);
  const step_end_mark end{rank_.board()};
  body_ = std::move(body);
  body_context_ = call_context::current();
  if (model) {
    model->keep();
    replicas_.begin_step(*model, x);
  }
  step_report report;
  report.error = skipped_by_some(false);
  if (!report.error)
    report = run_once(actors, model, x, false);
  auto verdict = replicas_.hear(model, report.error);
  // A rerun may show in turn that more modules keep state.
  for (int reruns = 0; reruns < most_reruns && runs_again(model, x, verdict);
       ++reruns) {
    take_back(*model, x, verdict.why);
    rank_.objects().withdraw(report.step);
    model->keep();
    report = run_once(actors, model, x, true);
    verdict = replicas_.hear(model, report.error);
  }
  body_ = nullptr;
  end_step(model, verdict.why);
  report.error = verdict.why;
  auto took = std::chrono::steady_clock::now() - begin;
  noted.reset();
  stats_.seconds = std::chrono::duration<double>(took).count();
  stats_.bytes_sent = fabric_.stats().bytes_sent - sent;
  auto now = offload_counts(rank_);
  stats_.offloaded_bytes = now.written - offloaded.written;
  stats_.offload_wait_seconds = now.wait_seconds - offloaded.wait_seconds;
  if (stats_.seconds > 0)
    rank_.board().step_ended(1 - stats_.executing_seconds / stats_.seconds);
  if (report.error)
    throw error{report.error};
  order_if_recorded(model, microbatches);
  return std::move(report.values);
}

uint64_t step_runner::take_number() {
  return numbered_ ? std::exchange(number_, 0) : ++number_;
}

void step_runner::order_if_recorded(model_state* model, uint64_t microbatches) {
  auto& records = rank_.records();
  if (auto note = records.note();
      records.fixed_order() && note.recorded
      && records.find(note.key, note.step)
      // In a rerun all calls waited: the next step is recorded.
      && stats_.ran_again.empty()
      && records.recorded_steps(note.key) > warm_up(model, microbatches))
    compute_order(model, microbatches, model && model->promises().learnt());
}

void step_runner::skip_step(model_state* model) {
  if (running_call::current())
    throw error{error_code::unsupported, "skip() inside a step"};
  if (model == nullptr || !model->partitioned())
    throw error{error_code::unsupported,
                "skip() before the model is partitioned; if a replica may have "
                "no samples at all, call the model's partition() on all ranks "
                "before the first step"};
  traces_.before(take_number());
  stats_ = {};
  ++rank_.counters().drawn_step; // as in the other replicas
  ++rank_.counters().backwards;
  const step_call nothing{.microbatches = 0};
  model->keep();
  replicas_.begin_step(*model, nothing);
  const step_end_mark end{rank_.board()};
  rank_.board().main_ends_step(true);
  auto verdict = replicas_.hear(model, skipped_by_some(true));
  if (runs_again(model, nothing, verdict)) {
    take_back(*model, nothing, verdict.why);
    verdict = replicas_.hear(model, {});
  }
  end_step(model, verdict.why);
  if (verdict.why)
    throw error{verdict.why};
}

/// Ranks that share modules wait for each other in these: all of them run a
/// step, or none does. Collective over them.
/// @returns the error, if any; not one of user code, so that nothing is rerun
failure step_runner::skipped_by_some(bool skips) const {
  auto group = rank_.layout().members(comm_group::mp, rank_.self());
  if (group.size() == rank_.pipeline().size())
    return {};
  auto all = rank_.exchange().all_gather(group, "smp.skips", to_payload(skips));
  std::vector<rank_id> skipping;
  std::vector<rank_id> running;
  for (size_t i = 0; i < all.size(); ++i)
    (from_payload<bool>(all[i], "begin of a step") ? skipping : running)
      .push_back(group[i]);
  if (skipping.empty() || running.empty())
    return {};
  return {error_code::protocol,
          skipping.front(),
          {},
          "skipped a step that rank " + std::to_string(running.front().value)
            + " runs: with smp.tensor_parallel_degree > 1 the ranks that share "
              "modules skip a step together; as long as one of them has "
              "samples, the others go on with batches of which nothing counts "
              "(docs/data_parallel.md)"};
}

/// All replicas roll back: gradients that one of them contributed to an average
/// with a broken promise are in the gradients of all.
void step_runner::take_back(model_state& model, const step_call& x,
                            const failure& why) {
  stats_.ran_again = why.describe();
  // Otherwise nobody would learn of an exception that does not occur again.
  if (rank_.self() == rank_id{0} && why.code == error_code::user_code)
    print_stderr("smp: step {} ran again, because: {}\n", rank_.drawn_step(),
                 stats_.ran_again);
  replicas_.take_back(model);
  model.take_back();
  model.keep();
  replicas_.begin_step(model, x);
  if (auto* observer = rank_.observer())
    observer->take_back();
  // More calls wait than in the recorded steps.
  rank_.records().outdate();
}

void step_runner::end_step(model_state* model, const failure& why) {
  replicas_.end_step(model, why);
  if (model)
    model->forget_kept();
  if (model && !why) {
    replicas_.compare_parameters(*model);
    model->watch_gradients();
  }
  if (!why && on_step_)
    on_step_(false);
}

namespace {

/// An error that only the ranks together detect fails the step as well.
void end_model_step(const rank_context& rank, model_state& model,
                    step_report& report) {
  try {
    model.end_step(!report.error);
  } catch (const error& e) {
    report.error = e.cause();
  } catch (const c10::AcceleratorError& e) {
    if (!report.error)
      report.error = device_failure(rank, e);
  }
}

} // namespace

step_report step_runner::run_once(node& actors, model_state* model,
                                  const step_call& x, bool again) {
  auto begin = std::chrono::steady_clock::now();
  rank_.board().main_ends_step(false);
  if (model)
    model->begin_step(again);
  auto& records = rank_.records();
  if (records.active() && rank_.pp_rank() == 0) {
    records.set_key(record_key(model, x.microbatches, x.signature));
    agree_on_record();
  }
  auto report = run_actors(actors, x.microbatches);
  report.error = shared_outcome(report.error);
  for (uint64_t m = 0; m < x.microbatches; ++m)
    rank_.calls().drop(report.step, microbatch_id{m});
  auto learnt = model && model->promises().learnt();
  if (model)
    end_model_step(rank_, *model, report);
  // The results of other microbatches never left this rank.
  if (report.error)
    rank_.objects().withdraw(report.step);
  auto took = std::chrono::steady_clock::now() - begin;
  note_record(model, x.microbatches,
              std::chrono::duration<double>(took).count(), learnt);
  return report;
}

failure step_runner::shared_outcome(const failure& mine) const {
  auto group = rank_.layout().members(comm_group::mp, rank_.self());
  if (group.size() == rank_.pipeline().size() || replicas::ends_session(mine))
    return mine;
  for (auto& x :
       rank_.exchange().all_gather(group, "smp.shared_step", to_payload(mine)))
    if (auto first = from_payload<failure>(x, "end of a step"))
      return first;
  return {};
}

namespace {

/// The facts that one rank knows about a failed step.
struct failed_step {
  bool promised = false;  // calls went on without their results
  bool keeps_out = false; // it must not run again
  /// Modules with state that were called too late.
  std::set<module_id> overtaken = {};
  /// Buffers that microbatches changed in any order.
  std::set<uint32_t> changed_late = {};
  /// Modules whose other state they changed so, and how.
  std::map<uint32_t, std::string> late_state = {};
  /// See `microbatch_sequencer::called_late`.
  std::set<module_id> called_late = {};
  /// LibTorch's engine failed, perhaps as one microbatch changed in place what
  /// another had kept for backward.
  bool failed_graph = false;
};

template <class Inspector>
bool inspect(Inspector& f, failed_step& x) {
  return f.object(x).fields(
    f.field("promised", x.promised), f.field("keeps_out", x.keeps_out),
    f.field("overtaken", x.overtaken), f.field("changed_late", x.changed_late),
    f.field("late_state", x.late_state), f.field("called_late", x.called_late),
    f.field("failed_graph", x.failed_graph));
}

} // namespace

/// A failure of code that continued with a promise is in doubt, wherever it
/// occurred, unless all promises hold. A step that was cut off cannot tell, so
/// it is rerun with all calls waiting, and the outcome of the rerun counts.
/// (But a flow that diverges from its record did so before a promise could
/// mislead it: until it is resolved, a promise shows the same as in the
/// recorded step.) Collective over all replicas.
bool step_runner::runs_again(model_state* model, const step_call& call,
                             const replicas::verdict& heard) const {
  if (!model || !heard.of_code || !model->minds_changes())
    return false;
  // The setting of pp_rank 0 for the body counts.
  failed_step mine{
    model->promises().promised(),
    (rank_.pp_rank() == 0
     && (call.no_rerun || (call.inputs_changed && call.inputs_changed())))
      || (rank_.records().active() && rank_.records().note().refused)
      || !model->keeps_changes() || !model->can_take_back()
      || (rank_.launches() && rank_.launches()->failed()),
    rank_.sequencer().overtaken_modules(),
    late_changes(),
    rank_.model()->changes->take_late_state(),
    rank_.sequencer().called_late(),
    rank_.counters().failed_graphs > 0 && rank_.counters().microbatches > 1
      && !rank_.sequencer().serial()};
  try {
    failed_step all;
    for (auto& x : rank_.exchange().all_gather(world_of(rank_), "smp.run_again",
                                               to_payload(mine))) {
      auto other = from_payload<failed_step>(x, "view of a failed step");
      all.promised = all.promised || other.promised;
      all.keeps_out = all.keeps_out || other.keeps_out;
      all.overtaken.merge(other.overtaken);
      all.changed_late.merge(other.changed_late);
      all.late_state.merge(other.late_state);
      all.called_late.merge(other.called_late);
      all.failed_graph = all.failed_graph || other.failed_graph;
    }
    if (!all.changed_late.empty())
      model->order_again(all.changed_late);
    if (!all.late_state.empty())
      model->keep_order_of(all.late_state);
    if (!all.called_late.empty() && !rank_.sequencer().serial())
      model->run_serially(all.called_late);
    if (all.failed_graph)
      model->run_serially();
    rank_.sequencer().distrust(all.overtaken);
    auto goes_right = all.promised || !all.overtaken.empty()
                      || !all.changed_late.empty() || !all.late_state.empty()
                      || all.failed_graph;
    return goes_right && !all.keeps_out;
  } catch (const error&) {
    return false; // a rank was lost; the first error is reported
  }
}

void step_runner::prepare(model_state& model, uint64_t microbatches,
                          const step_body& body) {
  if (!model.partitioned() && agree_everywhere(rank_, "smp.wants_trace", [&] {
        return model.wants_trace(rank_.pipeline().size());
      })) {
    // Ranks that are threads share the generator that initialises their models:
    // all must be done.
    auto world = world_of(rank_);
    rank_.exchange().barrier(world, "smp.trace");
    if (rank_.self() == world.front())
      trace(model, body);
  }
  model.partition();
  model.check_schedule(microbatches);
}

namespace {

/// A step ends when the device has done what it launched.
/// @returns how long it worked, in ns
/// @throws error if it has failed
uint64_t await_device(const rank_context& rank, step_id step) {
  auto& x = *rank.launches();
  auto done = std::make_shared<completion>();
  x.when_reached([done] { done->set(); });
  waiter::current().wait(done,
                         {.what = "what step " + std::to_string(step.value)
                                  + " launched on its device",
                          .from = std::nullopt,
                          .subject = {.what = wait_subject::kind::device}});
  if (auto why = x.failed())
    throw error{failure{
      error_code::user_code, rank.self(), {}, with_device_failure(rank, *why)}};
  return static_cast<uint64_t>(x.take_busy().count());
}

} // namespace

step_report step_runner::run_actors(node& actors, uint64_t microbatches) {
  auto& counters = rank_.counters();
  counters.executing_ns = 0;
  counters.requests = 0;
  counters.waits = 0;
  counters.failed_graphs = 0;
  counters.microbatches = microbatches;
  auto step = step_id{++counters.step};
  auto report = std::make_shared<awaited<step_report>>();
  actors.begin_step(smp::run_step{step, microbatches}, [report](step_report x) {
    report->set_value(std::move(x));
  });
  rank_.board().main_ends_step(true);
  auto result = awaited<step_report>::get(
    report, end_of_step(step, rank_.pipeline().front()));
  try {
    if (rank_.launches())
      counters.executing_ns = await_device(rank_, step);
  } catch (const error& e) {
    if (!result.error)
      result.error = e.cause();
  }
  stats_.executing_seconds += static_cast<double>(counters.executing_ns) * 1e-9;
  stats_.requests += counters.requests;
  stats_.waits += counters.waits;
  result.step = step;
  return result;
}

payload step_runner::run_body(running_call& ex) const {
  scoped_context context{body_context_};
  auto microbatch = ex.microbatch().value;
  if (SMP_FAULT("lost-microbatch") && microbatch == 1)
    microbatch = 0;
  ex.streams().enter_body();
  auto result = body_(microbatch);
  check_range_consumed(ex);
  if (auto& model = rank_.model())
    model->parameters->flush();
  // Results that the body stored elsewhere stay readable after the step.
  keep_promises_of(ex);
  fence(ex);
  check_order();
  return result;
}

namespace {

std::string text_of_change(const model_map& map, uint32_t tensor) {
  auto& name = map.tensor_name(tensor);
  if (!map.model().tensors[tensor].is_buffer)
    return "its parameter '" + name
           + "' changed within the step, in a call that was not known to do "
             "so: others may have read it too early or late. Such a step is "
             "run again by default (smp.fast_mode = \"auto\"), and need not be "
             "if the trace sees the change (smp.trace_device); from now on "
             "microbatches run one after the other";
  return "its buffer '" + name
         + "' changed, which it did not in the first training step, so that "
           "microbatches passed it in any order; from now on they keep it";
}

/// How a change that cannot be undone can be known in advance.
std::string advice_on_change(const model_map& map, uint32_t tensor) {
  return map.model().tensors[tensor].is_buffer
           ? ", but this step cannot be run again, as the buffer is large: "
             "name "
             "who changes it with smp::set_stateful"
           : ", but this step cannot be run again, as no copy of the parameter "
             "was kept";
}

} // namespace

/// @returns the tensors that changed although microbatches pass their modules
/// in any order
std::set<uint32_t> step_runner::late_changes() const {
  if (rank_.launches() && rank_.launches()->failed())
    return {}; // nothing can be read there
  auto& tensors = rank_.model()->map->model().tensors;
  auto result = rank_.model()->map->order().changed_late();
  // One microbatch alone is in order; but other ranks keep parameters.
  if (rank_.counters().microbatches < 2)
    std::erase_if(result, [&](auto t) { return tensors[t].is_buffer; });
  return result;
}

void step_runner::check_order() const {
  auto& model = rank_.model();
  if (!model)
    return;
  auto& order = model->map->order();
  auto late = late_changes();
  if (late.empty())
    return;
  auto tensor = *late.begin();
  auto text = text_of_change(*model->map, tensor);
  if (!order.keeps_late_changes())
    text += advice_on_change(*model->map, tensor);
  throw error{failure{error_code::unsupported, rank_.self(),
                      model->map->name(model->map->home(tensor)),
                      std::move(text)}};
}

void await_grant(running_call& ex) {
  // A later microbatch may begin now: it must see the writes of this one.
  if (auto& model = ex.rank().model())
    model->parameters->flush();
  // Otherwise too many microbatches would hold activations (R39).
  fence(ex);
  ex.executor().park(grant_call(ex.rank().self()));
}

uint64_t seed_of(const rank_context& rank, uint64_t drawn_step,
                 microbatch_id m) {
  auto part = rank.layout().rank(data_group(rank.config()), rank.self());
  return microbatch_seed(rank.config().seed, drawn_step, part, m.value);
}

// -- trace --------------------------------------------------------------------

namespace {

/// Holds the execution token on a thread that is not an executor's.
class token_turn {
public:
  explicit token_turn(execution_token& x)
    : token_(x), seat_(x.enroll([this] { granted_.notify(); })) {
    if (!token_.try_acquire(seat_))
      granted_.wait();
  }

  ~token_turn() {
    token_.leave(seat_);
  }

  token_turn(const token_turn&) = delete;
  token_turn& operator=(const token_turn&) = delete;

private:
  wake_up granted_;
  execution_token& token_;
  execution_token::seat seat_;
};

} // namespace

void step_runner::trace(model_state& model, const step_body& body) {
  // Random generators belong to the process (R26).
  token_turn turn{token_};
  auto& counters = rank_.counters();
  counters.microbatches = 1;
  model.trace(
    random_stream{seed_of(rank_, rank_.drawn_step() + 1, microbatch_id{0})},
    [&body] { body(0); });
}

} // namespace smp
