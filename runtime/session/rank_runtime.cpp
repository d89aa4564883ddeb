#include "runtime/session/rank_runtime.hpp"

#include "actors/cluster/membership.hpp"
#include "actors/order/order_book.hpp"
#include "actors/server/microbatch_sequencer.hpp"
#include "runtime/base/fault.hpp"
#include "runtime/base/print_stderr.hpp"
#include "runtime/base/vector_math.hpp"
#include "runtime/calls/entered_modules.hpp"
#include "runtime/device/rank_device.hpp"
#include "runtime/device/storage_copies.hpp"
#include "runtime/execution/device_failure.hpp"
#include "runtime/sharing/sharing.hpp"
#include "runtime/step/executor_thread.hpp"
#include "runtime/step/model_state.hpp"

#include <span>
#include <string>
#include <utility>

namespace smp {

namespace {

/// In bytes: what a rank has under way to others of its machine.
constexpr uint64_t device_arena = uint64_t{256} << 20;

comm_options options_of_stages(const session_config& x,
                               const rank_device* device) {
  constexpr uint64_t mb = 1 << 20;
  comm_options result;
  result.force_device_path = x.device_path.force;
  result.send_arena = x.device_path.send_arena * mb;
  result.receive_arena = x.device_path.receive_arena * mb;
  result.ranks_per_node = x.device_path.ranks_per_node;
  if (device != nullptr) {
    result.devices = device->copies();
    result.device_arena = device_arena;
  }
  return result;
}

/// One execution runs on the device, and the next is there when it ends.
constexpr uint64_t launch_ahead = 2;

/// @returns null if activations stay in memory
std::shared_ptr<offload_store>
make_offload(const session_config& x, rank_id self, const rank_device* device) {
  if (!x.offload_activations)
    return nullptr;
  auto warn = [self](const std::string& text) {
    print_stderr("smp: rank {}: {}\n", self.value, text);
  };
  offload_store::options options;
  options.dir = x.offload_dir.empty() ? default_offload_dir() : x.offload_dir;
  options.horizon = x.activation_loading_horizon;
  options.warn = warn;
  if (device)
    options.device = device->make_storage_copies();
  auto file = open_offload_file(options.dir);
  if (is_in_memory(options.dir))
    warn("'" + options.dir
         + "' is in memory, so that smp.offload_activations saves none; name a "
           "folder on a disk in smp.offload_dir");
  return offload_store::make(std::move(file), std::move(options));
}

/// How long to wait for the SUPERVISOR to report an unreachable rank as lost.
constexpr std::chrono::seconds patience_with_news{2};

/// Adds the machine of a lost rank, which users look at first. Ranks that leave
/// because of the loss are named without it.
/// @param host_of by rank; empty: all on one machine
failure with_machine(failure x, const std::vector<std::string>& host_of) {
  if (x.code == error_code::rank_down && x.rank.value < host_of.size()
      && x.machine.empty()) {
    x.machine = host_of[x.rank.value];
    x.text += " (on machine " + x.machine + ')';
  }
  return x;
}

} // namespace

rank_runtime::rank_runtime(parts x)
  : own_config_(std::move(x.config)),
    own_layout_(x.layout),
    own_device_(std::move(x.device)),
    own_board_(std::make_shared<rank_board>(x.fabric->self(), x.layout.size,
                                            std::move(x.record))),
    fabric_(std::make_shared<comm_fabric>(
      std::move(x.fabric), x.host, own_board_,
      options_of_stages(own_config_, own_device_.get()))),
    host_(std::move(x.host)),
    token_(std::move(x.token)),
    own_exchange_(*fabric_),
    own_collectives_(*fabric_, {},
                     own_device_ ? own_device_->copies() : nullptr,
                     &own_board_->record()),
    own_tensor_peers_(*this),
    own_objects_(*fabric_),
    own_offload_(make_offload(own_config_, fabric_->self(), own_device_.get())),
    own_sequencer_(std::make_shared<microbatch_sequencer>(
      fabric_->self(),
      [board = own_board_](module_id x) { return board->path_of(x); })),
    own_records_(std::make_shared<order_book>(
      order_book::options{own_config_.static_mode, own_config_.static_steps,
                          own_config_.deterministic_server})),
    policies_(own_config_,
              own_layout_.members(comm_group::pp, fabric_->self()).size(),
              *host_),
    steps_(*this, policies_, *fabric_, *token_) {
  warm_up_vector_math();
  register_classes(own_config_);
  self_ = fabric_->self();
  pipeline_ = own_layout_.members(comm_group::pp, self_);
  pp_rank_ = own_layout_.rank(comm_group::pp, self_);
  config_ = &own_config_;
  layout_ = &own_layout_;
  exchange_ = &own_exchange_;
  collectives_ = &own_collectives_;
  if (own_layout_.size(comm_group::tp) > 1)
    tensor_peers_ = &own_tensor_peers_;
  objects_ = &own_objects_;
  calls_ = &own_calls_;
  offload_ = own_offload_.get();
  records_ = own_records_.get();
  sequencer_ = own_sequencer_.get();
  board_ = own_board_.get();
  launches_ = own_device_.get();
  if (launches_)
    device_ = launches_->get();
}

rank_runtime::~rank_runtime() {
  stop();
}

// -- life ---------------------------------------------------------------------

server_options rank_runtime::options_of_server() {
  server_options x;
  x.self = self_;
  x.pipeline = pipeline_;
  for (auto rank : own_layout_.members(comm_group::mp, self_))
    if (own_layout_.rank(comm_group::pp, rank) == 0
        && rank != pipeline_.front())
      x.tied.push_back(rank);
  x.fabric = fabric_.get();
  x.services = this;
  x.token = token_;
  x.board = own_board_;
  x.schedule_actor = policies_.user();
  x.sequencer = own_sequencer_;
  x.tells_forwards = own_offload_ != nullptr;
  x.records = own_records_;
  x.launch_ahead = launches_ && !SMP_FAULT("unbounded-launches") ? launch_ahead
                                                                 : 0;
  return x;
}

void rank_runtime::start(const std::vector<std::string>& addresses) {
  node_ = std::make_unique<node>(*host_, options_of_server());
  fabric_->serve(node_->server());
  try {
    fabric_->start(addresses, *this);
  } catch (const error&) {
    // A rank that died since all have joined is unreachable, and so are the
    // ranks that left because of it: not a problem of transports.
    std::unique_lock guard{mutex_};
    if (told_loss_.wait_for(guard, patience_with_news,
                            [this] { return static_cast<bool>(told_); }))
      throw error{with_machine(told_, host_of_)};
    throw;
  }
}

void rank_runtime::stop() {
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
  // A stalled rank accepts no more messages.
  std::chrono::milliseconds limit{2000};
  if (std::unique_lock guard{mutex_}; down_.code == error_code::stalled)
    limit = std::chrono::milliseconds{0};
  fabric_->stop(limit);
  own_calls_.clear();
  if (own_offload_)
    own_offload_->stop();
}

std::vector<std::string>
rank_runtime::take_places(const std::vector<member>& all) {
  std::vector<std::string> machines;
  std::vector<std::string> result;
  for (auto& x : all) {
    machines.push_back(x.machine);
    result.push_back(x.fabric_address);
  }
  own_layout_.place(machines);
  own_collectives_.place(own_layout_.machine_of_ranks());
  fabric_->place(own_layout_.machine_of_ranks());
  if (own_layout_.machines() > 1)
    for (auto& x : all)
      host_of_.push_back(x.host);
  return result;
}

void rank_runtime::connect_devices() {
  if (launches_ == nullptr)
    return;
  auto world = own_layout_.members(comm_group::world, self_);
  auto gather = [&](const char* what, auto bytes) {
    auto mine = std::as_bytes(std::span{bytes});
    return own_exchange_.all_gather(world, what,
                                    {{mine.begin(), mine.end()}, {}});
  };
  std::vector<std::string> handles;
  for (auto& x : gather("smp.device.arenas", fabric_->arena_handle()))
    handles.emplace_back(reinterpret_cast<const char*>(x.bytes.data()),
                         x.bytes.size());
  std::string reached;
  for (bool x : fabric_->open_arenas(std::move(handles)))
    reached += x ? '1' : '0';
  std::vector<bool> by;
  for (auto& x : gather("smp.device.reached", reached))
    by.push_back(x.bytes.at(self_.value) == std::byte{'1'});
  fabric_->reached_by(std::move(by));
}

void rank_runtime::rank_down(const failure& x) {
  if (leaving_)
    return;
  {
    std::unique_lock guard{mutex_};
    if (!told_)
      told_ = x;
  }
  told_loss_.notify_all();
  if (x.rank != no_rank) {
    fabric_->peer_lost(x);
    return;
  }
  // The SUPERVISOR itself is lost: no lost rank would be reported any more, so
  // every wait for one ends now.
  auto each = x;
  for (auto rank : own_layout_.members(comm_group::world, self_))
    if (rank != self_) {
      each.rank = rank;
      fabric_->peer_lost(each);
    }
}

void rank_runtime::check_alive() const {
  std::unique_lock guard{mutex_};
  if (down_)
    throw error{down_};
}

// -- model and steps ----------------------------------------------------------

module_marks& rank_runtime::marks_for(const void* module,
                                      const std::string& function) {
  if (!state_ || !state_->partitioned())
    return marks_;
  auto& modules = state_->model().modules;
  for (uint32_t i = 0; i < modules.size(); ++i)
    if (modules[i].identity() == module)
      throw error{failure{error_code::unsupported, no_rank,
                          state_->map().name(module_id{i}),
                          function
                            + " has no effect once the model is partitioned: "
                              "call it before the first step, and before the "
                              "model's partition()"}};
  return marks_;
}

std::shared_ptr<model_state> rank_runtime::make_model(model_root root) {
  if (state_)
    throw error{error_code::unsupported,
                "a session has one distributed model; make one module that "
                "holds both, as of a GAN or of teacher and student, and give "
                "each an optimizer of its own (docs/api.md)"};
  state_ = std::make_shared<model_state>(*this, marks_, policies_,
                                         std::move(root));
  model_ = {state_, &state_->context()};
  own_board_->name_modules([model = std::weak_ptr{state_}](module_id x) {
    auto m = model.lock();
    return m ? m->map().name(x) : std::string{};
  });
  std::vector<std::string> paths;
  for (size_t i = 0; i < state_->model().modules.size(); ++i)
    paths.push_back(state_->map().name(module_id{i}));
  own_board_->record().name_modules(paths);
  return state_;
}

void rank_runtime::drop_model() noexcept {
  model_ = nullptr;
  state_ = nullptr;
  marks_ = {};
  own_records_->clear();
  own_sequencer_->set_modules({});
}

std::vector<payload> rank_runtime::run_step(const step_call& x,
                                            step_body body) try {
  check_alive();
  return steps_.run_step(*node_, state_.get(), x, std::move(body));
} catch (const error& e) {
  throw error{with_machine(e.cause(), host_of_)};
} catch (const c10::AcceleratorError& e) {
  throw error{device_failure(*this, e)};
}

void rank_runtime::skip_step() {
  check_alive();
  steps_.skip_step(state_.get());
}

// -- rank_services ------------------------------------------------------------

std::shared_ptr<executor> rank_runtime::make_executor() {
  return std::make_shared<executor_thread>(*this, *fabric_, steps_);
}

schedule_ptr rank_runtime::make_schedule(uint64_t microbatches) {
  return policies_.make(microbatches);
}

service_order rank_runtime::make_order(uint64_t microbatches) {
  return policies_.order(microbatches, pp_rank_,
                         state_ ? state_->gate().chunk_of(pp_rank_)
                                : std::vector<uint32_t>{});
}

std::vector<module_id> rank_runtime::ordered_modules(const request& x) {
  return state_ ? entered_modules(state_->map(), x) : std::vector<module_id>{};
}

completion_ptr rank_runtime::gather(const request& x) {
  return own_objects_.gather(x.needs, x.step, x.microbatch);
}

rank_id rank_runtime::awaited_by(const request& x) {
  return own_objects_.first_missing(x.needs).value_or(object_id{no_rank}).owner;
}

std::string rank_runtime::module_name(module_id x) {
  return own_board_->path_of(x);
}

void rank_runtime::step_failed(step_id step, const failure& why) {
  own_objects_.fail_step(step, why);
  own_collectives_.step_failed(step, why);
}

void rank_runtime::microbatch_over(step_id step, microbatch_id x) {
  own_calls_.drop(step, x);
  own_objects_.end_microbatch(step, x);
}

void rank_runtime::forward_over(step_id, uint64_t start_number) {
  if (own_offload_)
    own_offload_->announce(start_number);
}

void rank_runtime::step_over(step_id x) {
  if (own_offload_)
    own_offload_->end_step();
  own_objects_.end_step(x);
  own_collectives_.step_over(x);
}

// -- fabric_listener ----------------------------------------------------------

void rank_runtime::on_message(rank_id from, message x) {
  switch (x.kind) {
    case message_kind::exchange:
      own_exchange_.deliver(from, std::move(x));
      break;
    case message_kind::collective:
      own_collectives_.deliver(from, std::move(x));
      break;
    case message_kind::object:
      own_objects_.deliver(from, std::move(x));
      break;
    default: // the fabric knows who takes it
      break;
  }
}

void rank_runtime::on_peer_lost(const failure& lost) {
  if (leaving_)
    return;
  auto x = with_machine(lost, host_of_);
  // Ranks lost later may only have reacted to the first loss.
  auto first = x;
  {
    std::unique_lock guard{mutex_};
    if (!down_)
      down_ = x;
    first = down_;
  }
  own_exchange_.fail(x.rank, first);
  own_collectives_.fail(x.rank, first);
  own_objects_.fail(x.rank, first);
  if (std::shared_lock guard{node_mutex_}; node_)
    node_->rank_down(x);
}

} // namespace smp
