#include "runtime/session/engine.hpp"

#include "actors/replay/computed_order.hpp"
#include "actors/host/execution_token.hpp"
#include "actors/replay/record_book.hpp"
#include "actors/schedule/user_schedule.hpp"
#include "partition/checker.hpp"
#include "partition/promised_order.hpp"
#include "partition/timeline.hpp"
#include "runtime/session/executor_thread.hpp"
#include "runtime/base/fault.hpp"
#include "runtime/base/fnv_hash.hpp"
#include "runtime/session/model_state.hpp"
#include "runtime/remote/callee.hpp"
#include "runtime/remote/promised_call.hpp"
#include "runtime/model/script_walk.hpp"
#include "runtime/intercept/sequential.hpp"
#include "runtime/values/value_codec.hpp"

#include <semaphore>
#include <span>

#include <malloc.h>

namespace smp {

void load_schedule(session_config& x) {
  if (x.pipeline != "actor" || x.schedule_actor)
    return;
  if (x.schedule.plugin.empty())
    throw error{error_code::config,
                "smp.pipeline = \"actor\" needs smp.schedule.plugin and "
                "smp.schedule.name, or an actor in "
                "session_config::schedule_actor"};
  x.schedule_actor = load_schedule_actor(x.schedule.plugin, x.schedule.name);
}

namespace {

/// The order of `smp.deterministic_server` is computed for calls that wait.
bool takes_promises(const session_config& x) {
  return x.fast_mode && !x.deterministic_server;
}

} // namespace

engine::engine(parts x)
  : config_(std::move(x.config)),
    layout_(x.layout),
    board_(std::make_shared<rank_board>(x.fabric->self(), x.layout.size)),
    fabric_(std::make_shared<watched_fabric>(std::move(x.fabric), board_)),
    host_(std::move(x.host)),
    token_(std::move(x.token)),
    self_(fabric_->self()),
    exchange_(*fabric_),
    objects_(*fabric_),
    sequencer_(std::make_shared<smp::microbatch_sequencer>()),
    records_(std::make_shared<record_book>(record_book::options{
      config_.static_mode, config_.static_steps,
      config_.static_fallback == "dynamic", config_.deterministic_server,
      takes_promises(config_)})) {
  promises_ = std::make_unique<promise_book>(self_, takes_promises(config_),
                                             records_);
  pipeline_ = layout_.members(comm_group::pp, self_);
  pp_rank_ = layout_.rank(comm_group::pp, self_);
}

engine::~engine() {
  stop();
}

// -- life ---------------------------------------------------------------------

void engine::start(const std::vector<std::string>& addresses) {
  node_options options;
  options.self = self_;
  options.pipeline = pipeline_;
  options.fabric = fabric_.get();
  options.token = token_;
  options.board = board_;
  options.make_executor = [this](executor_listener& x) {
    return std::make_unique<executor_thread>(x, *this);
  };
  options.make_schedule
    = [this](uint64_t microbatches) { return new_schedule(microbatches); };
  if (config_.pipeline == "actor")
    user_schedule_ = make_user_schedule();
  options.schedule_actor = user_schedule_;
  options.make_order
    = [this](uint64_t microbatches) {
        return new_order(microbatches, pp_rank_);
      };
  options.sequencer = sequencer_;
  options.ordered_modules = [this](const request& x) {
    return model_ ? model_->order().entered_by(x) : std::vector<module_id>{};
  };
  options.records = records_;
  options.on_microbatch_done = [this](step_id s, microbatch_id m) {
    calls_.drop(s, m);
    objects_.end_microbatch(s, m);
  };
  options.gather = [this](const request& x) {
    return objects_.gather(x.needs, x.step, x.microbatch);
  };
  options.on_step_failed = [this](step_id s, const failure& why) {
    objects_.fail_step(s, why);
  };
  options.on_step_over = [this](step_id s) { objects_.end_step(s); };
  node_ = std::make_unique<node>(*host_, std::move(options));
  fabric_->start(addresses, *this);
}

void engine::stop() {
  leaving_ = true;
  if (stopped_.exchange(true))
    return;
  // Parked executions unwind first: they may still send.
  std::unique_ptr<node> ending;
  {
    std::unique_lock guard{node_mutex_};
    ending = std::move(node_);
  }
  ending.reset();
  // Who is stalled takes nothing any more.
  std::chrono::milliseconds limit{2000};
  if (std::unique_lock guard{mutex_}; down_.code == error_code::stalled)
    limit = std::chrono::milliseconds{0};
  fabric_->stop(limit);
  calls_.clear();
}

void engine::rank_down(const failure& x) {
  if (leaving_)
    return;
  if (x.rank != no_rank) {
    fabric_->peer_lost(x);
    return;
  }
  // The SUPERVISOR itself: nobody would tell of a lost rank any more, so every
  // wait for one ends now.
  auto each = x;
  for (auto rank : layout_.members(comm_group::world, self_))
    if (rank != self_) {
      each.rank = rank;
      fabric_->peer_lost(each);
    }
}

void engine::check_alive() const {
  std::unique_lock guard{mutex_};
  if (down_)
    throw error{down_};
}

void engine::set_model(std::shared_ptr<model_state> x) {
  if (model_)
    throw error{error_code::unsupported,
                "a session has one distributed model; a second one in the "
                "same session is not built yet"};
  model_ = std::move(x);
  board_->name_modules([model = std::weak_ptr{model_}](module_id y) {
    auto m = model.lock();
    return m ? m->name(y) : std::string{};
  });
}

void engine::clear_model() noexcept {
  model_ = nullptr;
  records_->clear();
}

// -- schedule -----------------------------------------------------------------

namespace {

/// Bytes that this process allocated and did not free.
uint64_t allocated_bytes() {
  auto x = ::mallinfo2();
  return x.uordblks + x.hblkhd;
}

} // namespace

std::shared_ptr<const user_schedule> engine::make_user_schedule() const {
  auto result = std::make_shared<user_schedule>();
  result->type = config_.schedule_actor;
  result->options = config_.schedule.options;
  result->partitions = pipeline_.size();
  result->active = [this](uint64_t microbatches) {
    return active(microbatches);
  };
  result->timeout = std::chrono::milliseconds{
    static_cast<int64_t>(config_.schedule.timeout * 1000)};
  result->memory_in_use = allocated_bytes;
  return result;
}

uint64_t engine::active(uint64_t microbatches) const {
  return config_.active_microbatches.value_or(default_active_microbatches(
    config_.pipeline, microbatches, config_.pipeline_parallel_degree));
}

schedule_ptr engine::new_schedule(uint64_t microbatches) const {
  return make_schedule(
    config_.pipeline, microbatches, active(microbatches),
    fit_list(config_.schedule.list, config_.microbatches, microbatches));
}

namespace {

/// A pipeline as its ranks serve it, where calls wait and where they do not.
struct served_pipeline {
  served_pipeline(const pipeline_program& x, bool promised)
    : program(promised ? promised_program(x) : x), promised(promised) {
    // nop
  }

  service_place place(uint32_t device, uint64_t microbatches) const {
    return promised ? promised_place_of(program, device, microbatches)
                    : place_of(program, device, microbatches);
  }

  pipeline_program program;
  bool promised;
};

service_order make_order(bool promised, std::string_view pipeline,
                         service_place x) {
  return promised ? make_promised_order(pipeline, std::move(x))
                  : make_service_order(pipeline, std::move(x));
}

} // namespace

service_order engine::new_order(uint64_t microbatches,
                                size_t pp_rank) const {
  service_place place{static_cast<uint32_t>(pp_rank),
                      static_cast<uint32_t>(pipeline_.size()), microbatches,
                      static_cast<uint32_t>(config_.chunks),
                      {}};
  if (pp_rank < chunk_of_.size())
    place.chunk_of = chunk_of_[pp_rank];
  return make_order(promises_->on(), config_.pipeline, std::move(place));
}

schedule_report engine::play_schedule(const pipeline_program& x,
                                      uint64_t microbatches,
                                      bool timeline) const {
  const served_pipeline served{x, promises_->on()};
  auto& program = served.program;
  check_options options;
  options.microbatches = microbatches;
  options.active = active(microbatches);
  options.timeline = timeline;
  for (uint32_t i = 0; i < program.devices; ++i)
    options.orders.push_back(make_order(served.promised, config_.pipeline,
                                        served.place(i, microbatches)));
  schedule_ptr policy;
  if (user_schedule_) {
    auto user = *user_schedule_;
    user.partitions = program.devices;
    policy = rehearse(*host_, user, microbatches);
  } else {
    policy = new_schedule(microbatches);
  }
  return smp::check_schedule(program, *policy, options);
}

void engine::check_schedule(uint64_t microbatches) {
  if (!checked_.insert(microbatches).second)
    return;
  // One rank plays for all: it takes time, and a user's schedule need not
  // decide the same twice.
  byte_writer out;
  if (pp_rank_ == 0) {
    failure refused;
    try {
      auto report = play_schedule(model_->program(), microbatches, false);
      schedule_text_ = schedule_summary(report, config_.pipeline, microbatches);
    } catch (const error& e) {
      refused = e.cause();
      if (refused.code != error_code::config)
        refused = {error_code::config, no_rank, {},
                   "the schedule is refused: " + refused.text};
    }
    out.u8(static_cast<uint8_t>(refused.code));
    out.string(refused.text);
    // Each rank's order of service needs its chunks.
    const served_pipeline served{model_->program(), promises_->on()};
    for (uint32_t i = 0; i < pipeline_.size(); ++i) {
      auto chunks = served.place(i, microbatches).chunk_of;
      out.u32(static_cast<uint32_t>(chunks.size()));
      for (auto x : chunks)
        out.u32(x);
    }
  }
  payload verdict;
  verdict.bytes = out.take();
  verdict = exchange_.broadcast(pipeline_, "smp.schedule", pipeline_.front(),
                                std::move(verdict));
  byte_reader in{verdict.bytes};
  auto code = static_cast<error_code>(in.u8("code"));
  auto text = in.string("text");
  if (code != error_code::none)
    throw error{code, std::move(text)};
  chunk_of_.resize(pipeline_.size());
  for (auto& chunks : chunk_of_) {
    chunks.resize(in.count(4, "chunks"));
    for (auto& x : chunks)
      x = in.u32("chunk");
  }
}

// -- steps --------------------------------------------------------------------

namespace {

/// @returns which tensors require grad, as a number.
uint64_t trainability(const model_state& st) {
  fnv_hash result;
  for (auto& x : st.model().tensors)
    result.add(uint64_t{x.tensor.defined() && x.tensor.requires_grad()});
  return result.get();
}

} // namespace

std::vector<payload> engine::run_step(uint64_t microbatches, step_body body,
                                      uint64_t signature) {
  check_alive();
  if (execution::current())
    throw error{error_code::unsupported, "a step inside a step"};
  if (model_) {
    if (!model_->partitioned() && agree_to_trace()) {
      // Ranks that are threads share the generator with which they make their
      // models: all have to be done.
      exchange_.barrier(pipeline_, "smp.trace");
      if (pp_rank_ == 0)
        trace(body);
    }
    model_->partition();
    check_schedule(microbatches);
  }
  auto begin = std::chrono::steady_clock::now();
  auto before = fabric_->stats();
  executing_ns_ = 0;
  requests_ = 0;
  waits_ = 0;
  microbatches_ = microbatches;
  held_results_.clear();
  body_ = std::move(body);
  body_context_ = call_context::current();
  if (model_) {
    model_->begin_step();
    promises_->begin_step(trainability(*model_));
  }
  if (records_->active() && pp_rank_ == 0)
    records_->set_key(record_key(microbatches, signature));
  auto step = step_id{++step_};
  auto report = std::make_shared<awaited<step_report>>();
  node_->begin_step(smp::run_step{step, microbatches},
                    [report](step_report x) {
                      report->set_value(std::move(x));
                    });
  auto x = awaited<step_report>::get(
    report, {"the end of step " + std::to_string(step.value),
             pipeline_.front()});
  body_ = nullptr;
  auto learnt = promises_->learnt();
  promises_->end_step();
  for (uint64_t m = 0; m < microbatches; ++m)
    calls_.drop(step, microbatch_id{m});
  if (model_)
    model_->end_step(!x.error);
  auto after = fabric_->stats();
  stats_.seconds
    = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin)
        .count();
  stats_.executing_seconds = static_cast<double>(executing_ns_) * 1e-9;
  stats_.requests = requests_;
  stats_.waits = waits_;
  stats_.bytes_sent = after.bytes_sent - before.bytes_sent;
  if (records_->active()) {
    auto note = records_->note();
    stats_.replayed = note.replayed;
    stats_.fell_back = !note.divergence.empty();
    // TorchScript runs code once to see what it is given, forward and then
    // backward; what it makes of it answers otherwise (zeros for nothing).
    size_t warm_up = model_ && model_->script() ? (microbatches > 1 ? 1 : 2) : 0;
    if (pp_rank_ == 0)
      records_->took(step, stats_.seconds, learnt, warm_up);
  }
  if (x.error) {
    // The results of other microbatches never got away from here.
    objects_.withdraw(held_results_);
    throw error{x.error};
  }
  if (records_->fixed_order() && records_->note().recorded)
    compute_order(microbatches);
  return std::move(x.values);
}

void engine::compute_order(uint64_t microbatches) {
  auto note = records_->note();
  auto mine = *records_->find(note.key, note.step);
  payload flow{encode_flow(mine), {}};
  flow.bytes.push_back(std::byte{sequencer_->used()});
  std::vector<step_record> ranks;
  auto ordered = false;
  for (auto& x :
       exchange_.all_gather(pipeline_, "smp.order", std::move(flow))) {
    if (x.bytes.empty())
      throw error{error_code::protocol, "a rank sent no flow"};
    ordered = ordered || x.bytes.back() != std::byte{0};
    ranks.push_back(
      decode_flow(std::span{x.bytes}.first(x.bytes.size() - 1)));
  }
  std::vector<service_order> orders;
  for (size_t i = 0; i < pipeline_.size(); ++i)
    orders.push_back(new_order(microbatches, i));
  // What a user's actor decides may depend on time.
  auto policy = user_schedule_
                  ? make_schedule("interleaved", microbatches,
                                  active(microbatches))
                  : new_schedule(microbatches);
  auto order = smp::compute_order(ranks, pipeline_, *policy, orders, ordered);
  mine.order = std::move(order.served[pp_rank_]);
  if (pp_rank_ == 0)
    mine.admission = std::move(order.admission);
  // Nobody waited while one microbatch ran after the other.
  for (auto& x : mine.executions)
    x.interrupted.assign(x.interrupted.size(), true);
  records_->choose(note.key, note.step, std::move(mine));
}

uint64_t engine::record_key(uint64_t microbatches, uint64_t signature) const {
  fnv_hash result;
  result.add(signature);
  result.add(microbatches);
  byte_writer context;
  call_context::current().write(context);
  for (auto x : context.take())
    result.add(static_cast<uint64_t>(x));
  if (model_) {
    result.add(trainability(*model_));
    auto& root = model_->model().modules.front();
    result.add(uint64_t{root.script ? is_training(*root.script)
                                    : root.object->is_training()});
  }
  return result.get();
}

bool engine::agree_to_trace() {
  payload verdict;
  if (pp_rank_ == 0)
    verdict.bytes = {std::byte{model_->wants_trace(pipeline_.size())}};
  verdict = exchange_.broadcast(pipeline_, "smp.wants_trace",
                                pipeline_.front(), std::move(verdict));
  byte_reader in{verdict.bytes};
  return in.boolean("whether to trace");
}

void engine::trace(const step_body& body) {
  // Random generators belong to the process (R26).
  struct turn {
    explicit turn(execution_token& x)
      : token(x), seat(x.enroll([this] { granted.release(); })) {
      if (!token.try_acquire(seat))
        granted.acquire();
    }
    ~turn() {
      token.leave(seat);
    }
    std::binary_semaphore granted{0};
    execution_token& token;
    execution_token::seat seat;
  } mine{*token_};
  microbatches_ = 1;
  model_->trace(initial_stream(step_id{step_ + 1}, microbatch_id{0}),
                [&body] { body(0); });
}

payload engine::execute(execution& ex, request& x) {
  if (!ex.is_root) {
    auto answer = serve(*this, ex, x);
    fence(ex);
    return answer;
  }
  scoped_context context{body_context_};
  auto microbatch = x.microbatch.value;
  if (SMP_FAULT("lost-microbatch") && microbatch == 1)
    microbatch = 0;
  auto result = body_(microbatch);
  check_range_consumed(ex);
  if (model_)
    model_->flush();
  // What the body put elsewhere can be read there when the step is over.
  keep_promises_of(ex);
  fence(ex);
  return result;
}

void engine::await_grant(execution& ex) {
  // Else more microbatches than allowed would hold activations (R39).
  fence(ex);
  call c;
  c.kind = call_kind::grant;
  c.owner = self_;
  c.what = phase::backward;
  c.why = {"the grant of its backward phase", self_};
  ex.park(std::move(c));
}

random_stream engine::initial_stream(step_id s, microbatch_id m) const {
  return random_stream{
    microbatch_seed(config_.seed, s.value,
                    layout_.rank(comm_group::dp, self_), m.value)};
}

// -- fabric_listener ----------------------------------------------------------

void engine::on_message(rank_id from, message x) {
  switch (x.kind) {
    case message_kind::exchange:
      exchange_.deliver(from, std::move(x));
      break;
    case message_kind::object:
      objects_.deliver(from, std::move(x));
      break;
    default:
      if (std::shared_lock guard{node_mutex_}; node_)
        node_->deliver(from, std::move(x));
  }
}

void engine::on_peer_lost(const failure& x) {
  if (leaving_)
    return;
  {
    std::unique_lock guard{mutex_};
    if (!down_)
      down_ = x;
  }
  exchange_.peer_lost(x);
  objects_.peer_lost(x);
  if (std::shared_lock guard{node_mutex_}; node_)
    node_->rank_down(x);
}

} // namespace smp
