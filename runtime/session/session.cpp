#include "runtime/session/session.hpp"

#include "actors/cluster/membership.hpp"
#include "actors/comm/message_priority.hpp"
#include "actors/inspection/entry_file.hpp"
#include "actors/server/execution_token.hpp"
#include "runtime/base/print_stderr.hpp"
#include "runtime/collectives/agreement.hpp"
#include "runtime/collectives/current_rank.hpp"
#include "runtime/config/config_file.hpp"
#include "runtime/device/rank_device.hpp"
#include "runtime/launch/environment.hpp"
#include "runtime/launch/network_choice.hpp"
#include "runtime/launch/rendezvous.hpp"
#include "runtime/launch/run_outcome.hpp"
#include "runtime/launch/secret_handover.hpp"
#include "runtime/launch/shared_segments.hpp"
#include "runtime/launch/stopped_ranks.hpp"
#include "runtime/process/control_group.hpp"
#include "runtime/process/cores.hpp"
#include "runtime/process/limits.hpp"
#include "runtime/process/shared_flights.hpp"
#include "runtime/session/rank_runtime.hpp"
#include "runtime/session/stalls.hpp"
#include "runtime/step/model_state.hpp"
#include "transport/build_id.hpp"
#include "transport/bytes.hpp"
#include "transport/loopback/loopback_fabric.hpp"
#include "transport/process_state.hpp"
#include "transport/ucx/ucx_fabric.hpp"

#include <ATen/Parallel.h>

#include <algorithm>
#include <cstdlib>
#include <exception>

#include <sched.h>
#include <unistd.h>

namespace smp {

namespace {

/// Timeout for ranks of one machine, which start together.
constexpr std::chrono::seconds patience_on_machine{30};

layout_config layout_of(const session_config& x, uint64_t world_size) {
  layout_config result;
  result.size = world_size;
  result.pipeline = x.pipeline_parallel_degree;
  result.tensor = x.tensor_parallel_degree;
  result.ddp = x.ddp;
  result.placement = x.placement_strategy;
  return result;
}

/// The error for a pipeline with more ranks than were started. A shell
/// created by srun or a cluster claims to be a rank, and then --ranks starts
/// none.
std::string too_few_ranks(const rank_environment& x, uint64_t wanted) {
  auto there = x.world_size == 1
                 ? std::string{"this process is the only rank"}
                 : "there are " + std::to_string(x.world_size) + " ranks";
  auto number = std::to_string(wanted);
  auto result = "smp.pipeline_parallel_degree = " + number + ", but " + there
                + ": start the program with --ranks " + number
                + " (smp::init), or by mpirun, srun or torchrun";
  if (!x.told_by.empty() && !x.supervised)
    result += "; --ranks starts none here, as the environment tells of a "
              "launcher: to be without one, unset "
              + x.told_by;
  return result;
}

/// Gives each rank of this machine its own cores, as mpirun does: two ranks
/// whose threads happen to share a core wait for each other although another
/// core is idle (measured: 8 % of a step at width 256, 15 % at width 64). Only
/// among the cores that this process may use, and only if there are enough.
/// @param threads that the user wants; 0: one for each core
void bind_to_cores(const rank_environment& env, uint64_t threads) {
  auto cores = usable_cores();
  auto share = env.local_size > 0 ? cores.size() / env.local_size : 0;
  if (share == 0 || threads > share || env.local_rank >= env.local_size)
    return;
  cpu_set_t mine;
  CPU_ZERO(&mine);
  for (uint64_t i = 0; i < share; ++i)
    CPU_SET(cores[env.local_rank * share + i], &mine);
  // Threads created from here on inherit it. A failure does no harm.
  (void)sched_setaffinity(0, sizeof(mine), &mine);
}

/// @returns how many cores of its machine are for a rank
uint64_t cores_of(const member& x, const std::vector<member>& all) {
  std::vector<std::vector<uint32_t>> here;
  for (auto& y : all)
    if (y.machine == x.machine)
      here.push_back(y.cores);
  auto share = share_of_cores(x.cores, here);
  return std::min(
    share, share_of_cpus(read_control_group(), here.size()).value_or(share));
}

/// How the ranks of this machine share memory.
struct shared_memory {
  /// UCX names, each followed by a comma; empty: memory is not shared.
  std::string transports;
  /// Why not through files, which is the default.
  std::optional<std::string> no_files;
};

/// Same on all ranks of this machine: they could not communicate otherwise.
shared_memory choose_shared_memory(const rank_environment& env) {
  // The other ranks here are not known for sure before all have joined.
  auto here = env.local_size > 0 ? env.local_size : env.world_size;
  shared_memory result;
  if (!env.supervised)
    result.no_files = no_room_for_shared_memory(shared_memory_folder(), here,
                                                env.run_id);
  else if (!env.no_shared_memory.empty())
    result.no_files = env.no_shared_memory;
  if (!result.no_files)
    result.transports = "posix,cma,";
  else if (system_v_has_room(here))
    result.transports = "sysv,cma,";
  return result;
}

/// Warns of what a user would not expect on one machine: that ranks do not
/// share memory although they could, and that their ports are open to others.
/// @param transports requested from UCX; its own variable takes precedence
void tell_of_transports(const shared_memory& memory,
                        const std::string& transports, bool trusted_network) {
  auto* asked = std::getenv("UCX_TLS");
  if (asked == nullptr && memory.no_files && memory.transports.empty())
    print_stderr(
      "smp: no shared memory between ranks: {}, and none of System V either; "
      "they talk by tcp, which is slower\n",
      *memory.no_files);
  else if (asked == nullptr && memory.no_files)
    print_stderr("smp: {}; ranks share memory of System V instead\n",
                 *memory.no_files);
  auto used = asked != nullptr ? std::string{asked} : transports;
  if (!trusted_network && opens_ports(used))
    print_stderr(
      "smp: UCX ({}) listens at the loopback interface, where every user of "
      "this machine can connect: docs/secret.md; "
      "transport.trusted_network = true says that this is known\n",
      used);
}

std::shared_ptr<fabric> make_fabric(const rank_environment& env,
                                    const session_config& x,
                                    const network_choice& network,
                                    const run_secret& secret) {
  rank_id self{env.rank};
  if (env.world_size == 1) {
    auto network = std::make_shared<loopback_network>(
      1, loopback_options{.seed = 1, .reorder = false, .stepped = false});
    return {network, &network->at(self)};
  }
  ucx_options options;
  // Set to what this run needs, not to what the configuration allows.
  options.trusted_network = network.line.has_value();
  options.interface = network.interface;
  options.spin = std::chrono::microseconds{x.spin};
  options.token = secret.token("ucx");
  // For messages too small for the stages, which order all others this way.
  options.priority = priority_of;
  if (network.line)
    options.silence = network.line->silence;
  auto memory = choose_shared_memory(env);
  // UCX does not ask who connects: where all ranks share memory, it need not
  // open a port.
  auto needs_tcp = network.line || memory.transports.empty();
  options.transports = memory.transports + (needs_tcp ? "tcp,self" : "self");
  if (env.local_rank == 0)
    tell_of_transports(memory, options.transports, x.trusted_network);
  return std::make_shared<ucx_fabric>(self, env.world_size, options);
}

/// Rank 0 may learn from the fabric that a rank is lost, but not that a whole
/// machine is.
void tell_loss(const failure& x) {
  if (x.code == error_code::rank_down && x.rank != no_rank)
    print_stderr("smp: {}\n", x.describe());
}

/// Ends all uses of actors and the fabric by `x`, on its user's thread.
void end(rank_runtime& x) {
  x.stop();
  x.detach_main_thread();
  if (rank_context::current() == &x)
    rank_context::set_current(nullptr);
}

} // namespace

/// Order of destruction: members leave before the supervisor stops.
struct session::process {
  std::shared_ptr<actor_host> host = std::make_shared<actor_host>();
  std::unique_ptr<supervisor_host> supervisor;
  std::unique_ptr<published_point> published;
  run_secret secret;
  network_choice network;
  std::unique_ptr<membership> me;
  /// For a rank that is alone; otherwise the SUPERVISOR has it.
  std::unique_ptr<stall_search> stalls;
  /// See `session::run_dir`.
  std::string run_dir;
  /// For a rank that is alone, in `run_dir`; otherwise our launcher has it.
  std::unique_ptr<published_entry> entry;
  /// All ranks said goodbye.
  bool over = false;

  ~process() {
    if (!over)
      remove_segments_of_lost_ranks();
  }

  void find_supervisor(rank_environment& env, const session_config& config);
  void host_supervisor(rank_environment& env, const session_config& config,
                       const std::optional<run_secret>& given);

  std::chrono::milliseconds join_limit() const {
    if (network.line)
      return patience_between_machines;
    return patience_on_machine;
  }

  std::vector<member> join(const rank_environment& env, rank_runtime& rank,
                           std::string settings);

  /// Returns when all ranks have begun.
  void begin(const rank_environment& env, rank_runtime& rank,
             std::string settings);

  /// @returns nullopt if it has been published already
  std::optional<inspection_entry> open_inspection() {
    if (entry)
      return std::nullopt;
    if (supervisor)
      return supervisor->open_inspection();
    if (stalls)
      return stalls->open_inspection();
    return std::nullopt;
  }
};

/// Our own launcher has a SUPERVISOR. Under another launcher, rank 0 creates
/// it: at the port that the launcher chose (MASTER_PORT), or at any free one,
/// which the others read from a file. They read the secret the same way, unless
/// the user gave it to all, or gave the keys with which they can request it.
void session::process::find_supervisor(rank_environment& env,
                                       const session_config& config) {
  auto given = given_secret(env);
  std::optional<meeting_point> point;
  if (!env.supervised && env.rank > 0 && env.rendezvous_port == 0) {
    point = await_point(env, config.keys.empty() ? patience_on_machine
                                                 : patience_between_machines);
    env.rendezvous_address = point->address;
    env.rendezvous_port = point->port;
  }
  network = choose_network(env, config);
  env.rendezvous_address = network.master;
  if (!env.supervised && env.rank == 0)
    return host_supervisor(env, config, given);
  if (!given && network.line)
    given = ask_master(env.rendezvous_address, env.rendezvous_port,
                       *network.line)
              .secret;
  if (!given)
    given = (point ? *point : await_point(env, patience_on_machine)).secret;
  if (!given)
    throw config_error(std::string{"environment: rank 0 has "}
                       + secret_file_variable + ", this rank has not");
  secret = *given;
}

void session::process::host_supervisor(rank_environment& env,
                                       const session_config& config,
                                       const std::optional<run_secret>& given) {
  secret = given ? *given : run_secret::make();
  supervisor_host::options x;
  x.world_size = env.world_size;
  x.run_id = env.run_id;
  x.secret = secret;
  x.address = env.rendezvous_address;
  x.port = env.rendezvous_port;
  x.line = network.line;
  x.on_refused = [](const std::string& y) {
    print_stderr("smp: refused a connection from {}\n", y);
  };
  x.join_limit = join_limit();
  // The processes' ends are not reported, so a loss waits for no report; but
  // when a machine is lost, its ranks are lost one after the other.
  if (!network.line)
    x.report_grace = std::chrono::milliseconds{0};
  else
    x.on_rank_down = tell_loss;
  x.stalls = stalls_of(config);
  // The ranks themselves learn of all other stalls.
  x.on_stall = [](const stall_report& y) {
    if (!y.ranks_know && !y.ends)
      print_stderr("smp: {}\n", y.text);
  };
  const bool port_is_known = env.rendezvous_port != 0;
  supervisor = std::make_unique<supervisor_host>(*host, std::move(x));
  env.rendezvous_port = supervisor->port();
  auto told = given || network.line ? std::nullopt : std::optional{secret};
  if (!port_is_known || told)
    published = std::make_unique<published_point>(
      env, meeting_point{env.rendezvous_port, told, env.rendezvous_address});
}

/// @returns all ranks
std::vector<member> session::process::join(const rank_environment& env,
                                           rank_runtime& rank,
                                           std::string settings) {
  membership::options x;
  x.address = env.rendezvous_address;
  x.port = env.rendezvous_port;
  x.line = network.line;
  x.secret = secret;
  x.world_size = env.world_size;
  x.join_limit = join_limit();
  x.on_rank_down = [weak = weak_from(rank)](const failure& y) {
    if (auto rank = weak.lock())
      rank->rank_down(y);
  };
  x.watch = rank.watch();
  x.me.stalls = stalls_of(rank.config());
  // If ranks have no logs of their own, the first remaining rank prints it.
  x.says_silence = !env.supervised && env.rank == 1;
  if (!env.supervised)
    x.stopped_here = [run = env.run_id] { return stopped_ranks_here(run); };
  x.me.rank = rank.self();
  x.me.pid = getpid();
  x.me.host = host_name();
  x.me.machine = machine_identity();
  x.me.cores = usable_cores();
  x.me.run_id = env.run_id;
  x.me.build = build_id();
  x.me.settings = std::move(settings);
  x.me.fabric_address = rank.fabric().address();
  me = std::make_unique<membership>(*host, std::move(x));
  auto result = me->join();
  published.reset();
  return result;
}

void session::process::begin(const rank_environment& env, rank_runtime& rank,
                             std::string settings) {
  std::vector<std::string> addresses{rank.fabric().address()};
  uint64_t cores = 0;
  if (env.world_size > 1) {
    auto all = join(env, rank, std::move(settings));
    cores = cores_of(all.at(env.rank), all);
    addresses = rank.take_places(all);
  } else {
    cores = usable_cores().size();
    cores = std::min(cores,
                     share_of_cpus(read_control_group(), 1).value_or(cores));
  }
  auto threads = rank.config().threads;
  at::set_num_threads(static_cast<int>(threads > 0 ? threads : cores));
  rank.attach_main_thread();
  rank.start(addresses);
  rank.connect_devices();
  if (env.world_size == 1)
    stalls = std::make_unique<stall_search>(*host, stalls_of(rank.config()),
                                            std::vector{rank.watch()});
  rank.exchange().barrier(world_of(rank), "smp.joined");
  run_dir = env.run_dir;
  if (env.supervised) {
    progress_report report;
    report.session_begins();
    rank.steps().on_step(report);
  }
  if (stalls && !run_dir.empty())
    entry = std::make_unique<published_entry>(run_dir,
                                              stalls->open_inspection());
}

session::session(session_config config, std::string settings)
  : unwinding_(std::uncaught_exceptions()) {
  validate(config);
  if (settings.empty())
    settings = shared_settings(config);
  load_schedule(config);
  auto env = read_rank_environment().value_or(rank_environment{});
  if (auto ranks = config.pipeline_parallel_degree; ranks > env.world_size)
    throw config_error(too_few_ranks(env, ranks));
  auto layout = layout_of(config, env.world_size);
  (void)rank_layout{layout}; // throws before anything starts
  check_limits(env.world_size);
  auto device = choose_device(config.device, env.local_rank);
  if (config.device == "auto")
    settings += fmt::format("device that smp.device = auto found = {}\n",
                            device
                              ? c10::DeviceTypeName(device->get().type(), true)
                              : "cpu (smp.device = cpu: everywhere)");
  // Another launcher binds its ranks itself, and a driver has threads of its
  // own.
  if (env.supervised && !device)
    bind_to_cores(env, config.threads);
  process_ = std::make_unique<process>();
  if (env.world_size > 1)
    process_->find_supervisor(env, config);
  rank_runtime::parts parts;
  parts.layout = layout;
  parts.host = process_->host;
  parts.token = std::make_shared<execution_token>();
  parts.device = std::move(device);
  parts.record = make_flight_record(rank_id{env.rank});
  parts.fabric = make_fabric(env, config, process_->network, process_->secret);
  parts.config = std::move(config);
  rank_ = std::make_shared<rank_runtime>(std::move(parts));
  rank_->set_owner(this);
  rank_->write_to(env.run_dir);
  rank_->on_inspection([x = process_.get()] { return x->open_inspection(); });
  set_current(this);
  // All other processes of our launcher have a log of their own.
  if (env.rank > 0 && !env.supervised)
    rank_->keep_stalls_quiet();
  try {
    process_->begin(env, *rank_, std::move(settings));
  } catch (...) {
    // Not when the last owner releases it: that may be a callback of the
    // membership, on the thread on which the SERVER would have to end.
    end(*rank_);
    throw;
  }
}

session::session(session_config config, std::shared_ptr<rank_runtime> x)
  : rank_(std::move(x)), unwinding_(std::uncaught_exceptions()) {
  validate(config);
  rank_->set_owner(this);
  rank_->attach_main_thread();
  rank_->connect_devices();
  set_current(this);
}

session::~session() {
  // While an exception unwinds this rank, the others must see a loss, not wait
  // for it in a barrier.
  if (std::uncaught_exceptions() == unwinding_) {
    try {
      finish();
    } catch (const error& e) {
      // Nothing else reports an error of a collective here.
      if (e.code() == error_code::protocol)
        print_stderr("smp: {}\n", e.what());
    } catch (const std::exception&) {
      // A rank died during the goodbyes; there is nothing left to lose.
    }
  }
  rank_->board().leave();
  if (process_) {
    process_->entry.reset();
    process_->stalls.reset();
  }
  end(*rank_);
}

void session::finish() {
  if (std::exchange(finished_, true))
    return;
  rank_->check_alive();
  if (auto& model = rank_->state())
    model->await_updates(); // their senders wait for this rank
  rank_->steps().leave();
  rank_->exchange().barrier(world_of(*rank_), "smp.goodbye");
  rank_->begin_goodbye();
  if (process_ && process_->me)
    process_->me->leave();
  if (process_)
    process_->over = true;
  if (auto why = rank_->collectives().untold())
    throw error{std::move(why)};
}

const session_config& session::config() const noexcept {
  return rank_->config();
}

const rank_layout& session::layout() const noexcept {
  return rank_->layout();
}

uint64_t session::rank() const noexcept {
  return rank_->self().value;
}

uint64_t session::size() const noexcept {
  return layout().size(comm_group::world);
}

uint64_t session::pp_rank() const noexcept {
  return rank_->pp_rank();
}

std::string session::run_dir() const {
  return process_ ? process_->run_dir : std::string{};
}

step_stats session::last_step() const {
  return rank_->steps().last_step();
}

fabric_stats session::traffic() const {
  return rank_->fabric().stats();
}

rank_runtime& session::internals() const noexcept {
  return *rank_;
}

session& session::current() {
  if (auto* x = current_or_null())
    return *x;
  throw no_session();
}

session* session::current_or_null() noexcept {
  auto* rank = rank_context::current();
  return rank ? rank->owner() : nullptr;
}

void session::set_current(session* x) noexcept {
  rank_context::set_current(x ? &x->internals() : nullptr);
}

} // namespace smp
