#include "actors/comm/comm_fabric.hpp"

#include "actors/comm/message_priority.hpp"
#include "actors/comm/stage_actors.hpp"
#include "actors/protocol/actor_scheduler.hpp"
#include "actors/protocol/server_handle.hpp"

#include <caf/send.hpp>

#include <algorithm>
#include <string>
#include <utility>

namespace smp {

namespace {

/// Upper bound, in bytes, on memory that is kept for reuse after tensors were
/// copied out of a nearly full receive arena.
constexpr uint64_t pool_limit = uint64_t{256} << 20;

/// Messages in flight to a rank: more do not raise the throughput.
constexpr uint64_t window_messages = 8;

/// Their bytes; a single message may exceed this.
constexpr uint64_t window_bytes = uint64_t{128} << 20;

bool on_device_path(const comm_tensor& x) noexcept {
  return x.rule == comm_rule::device_path;
}

bool any_on_device_path(const comm_message& x) noexcept {
  return std::any_of(x.tensors.begin(), x.tensors.end(), on_device_path);
}

bool is_lent(const comm_tensor& x) noexcept {
  return on_device_path(x) && x.lends;
}

/// Whether the receiver decides where the tensor goes.
bool is_placed(const comm_tensor& x) noexcept {
  return on_device_path(x) && !x.lends;
}

bool any_placed(const comm_message& x) noexcept {
  return std::any_of(x.tensors.begin(), x.tensors.end(), is_placed);
}

bool is_on_host(const tensor_ref& x) noexcept {
  return x.device == device_ref{} && !x.ready;
}

/// Whether a tensor rides in the first message, from host memory to host
/// memory, so that no stage has anything to do for it.
bool just_rides(const tensor_ref& x) noexcept {
  return x.nbytes <= riding_limit && is_on_host(x) && x.home == device_ref{};
}

template <class Predicate>
bool all_tensors(const message& x, Predicate f) {
  return std::all_of(x.body.tensors.begin(), x.body.tensors.end(), f);
}

bool is_for_server(const message& x) noexcept {
  return x.kind == message_kind::request || x.kind == message_kind::response
         || x.kind == message_kind::control;
}

uint64_t bytes_of(const message& x) noexcept {
  return x.body.bytes.size() + tensor_bytes(x.body);
}

} // namespace

comm_fabric::comm_fabric(std::shared_ptr<fabric> inner,
                         std::shared_ptr<rank_board> board,
                         const comm_options& options, hand_over f)
  : forwarding_fabric(std::move(inner)),
    board_(std::move(board)),
    placing_(dynamic_cast<placing_fabric*>(&this->inner())),
    router_(self(), options),
    has_devices_(options.devices != nullptr),
    devices_(has_devices_
               ? options.devices
               : std::shared_ptr<device_ops>{std::make_shared<host_ops>()}),
    device_patience_(options.device_patience),
    arenas_(options.devices, options.device_arena),
    pool_(router_.has_fabric_arenas() ? pool_limit : 0),
    hand_over_(std::move(f)),
    waits_(std::make_shared<device_waits>(
      [this](comm_stage at, comm_message_ptr x) { turn(at, std::move(x)); })) {
  if (router_.has_fabric_arenas())
    prepare_device_path(options);
}

comm_fabric::comm_fabric(std::shared_ptr<fabric> inner,
                         std::shared_ptr<actor_host> host,
                         std::shared_ptr<rank_board> board,
                         const comm_options& options)
  : comm_fabric(
    std::move(inner), std::move(board), options,
    [this](comm_stage to, comm_message_ptr x, std::chrono::milliseconds after) {
      actors_->hand_over(to, std::move(x), after);
    }) {
  actors_ = std::make_unique<stage_actors>(std::move(host), *this);
}

comm_fabric::~comm_fabric() {
  // Otherwise the fabric below might still call objects that end here.
  stop(std::chrono::milliseconds{0});
}

void comm_fabric::prepare_device_path(const comm_options& options) {
  if (placing_ == nullptr)
    throw error{error_code::unsupported,
                "the device path without devices: this fabric "
                "does not ask where tensors shall lie"};
  send_arena_.emplace(options.send_arena);
  receive_arena_.emplace(options.receive_arena);
  for (auto x : {&*send_arena_, &*receive_arena_})
    if (auto size = x->status().capacity; size > 0)
      placing_->register_memory(x->memory(), size);
  placing_->place_with(*this);
}

// -- COMM INITIATOR -----------------------------------------------------------

comm_message_ptr comm_fabric::make(rank_id to, message x, sent_callback done) {
  auto result = std::make_shared<comm_message>();
  result->number = next_++;
  result->peer = to;
  result->done = std::move(done);
  result->bytes = bytes_of(x);
  result->since = comm_ledger::clock::now();
  for (size_t i = 0; i < x.body.tensors.size(); ++i) {
    auto& t = x.body.tensors[i];
    if (t.nbytes <= riding_limit)
      continue;
    auto rule = router_.rule_for(t.device, to);
    result->tensors.push_back({next_++, i, t.nbytes, t.dtype, t.device, rule});
    if (rule != comm_rule::device_path)
      ledger_.sent(rule);
  }
  result->content = std::move(x);
  return result;
}

void comm_fabric::send(rank_id to, message x, sent_callback done) {
  board_->sent(to);
  // No stage has anything to do: all tensors ride, or stay in host memory.
  if (all_tensors(x, just_rides)
      || (to == self() && all_tensors(x, is_on_host)))
    return inner().send(to, std::move(x), std::move(done));
  auto m = make(to, std::move(x), std::move(done));
  note(flight_kind::transfer_begins, *m);
  ledger_.handled(comm_stage::initiator, m->bytes);
  if (!any_on_device_path(*m)) {
    ledger_.enter(*m, comm_stage::requester);
    return take_host_path(m);
  }
  ledger_.enter(*m, comm_stage::d2d_allocator);
  allocate(std::move(m));
}

void comm_fabric::note(flight_kind kind, const comm_message& x) {
  flight_event event;
  event.kind = kind;
  event.number = x.number;
  event.peer = static_cast<uint32_t>(x.peer.value);
  event.amount = x.bytes;
  board_->record().note(event);
}

// -- host path ----------------------------------------------------------------

void comm_fabric::take_host_path(const comm_message_ptr& x) {
  if (is_away(x->content)) {
    ledger_.move(x->number, comm_stage::preprocessing);
    return turn(comm_stage::preprocessing, x);
  }
  // The fabric refuses tensors on a device that this rank does not have.
  ledger_.passed_by(comm_stage::preprocessing);
  request(x);
}

void comm_fabric::request(const comm_message_ptr& x) {
  ledger_.handled(comm_stage::requester, x->bytes);
  begin(x);
}

// -- device path: this rank sends ---------------------------------------------

void comm_fabric::allocate(comm_message_ptr x) {
  auto same_node = router_.link_to(x->peer).same_node;
  // On the same node the receiver reads the tensors in place if they are in
  // host memory.
  if (same_node && !is_away(x->content)) {
    ledger_.passed_by(comm_stage::d2d_allocator);
    return begin(x);
  }
  ledger_.handled(comm_stage::d2d_allocator, x->bytes);
  for (auto& t : x->tensors) {
    if (!on_device_path(t))
      continue;
    t.lends = same_node && t.device != device_ref{};
    t.block = t.lends ? arenas_.take(t.nbytes) : send_arena_->take(t.nbytes);
    if (t.block)
      continue;
    t.rule = comm_rule::no_space;
    ledger_.sent(t.rule);
  }
  if (!any_on_device_path(*x))
    return take_host_path(x);
  auto at = same_node ? comm_stage::d2d_send : comm_stage::cross_node_progress;
  ledger_.move(x->number, at);
  turn(at, std::move(x));
}

// -- both paths: this rank sends ----------------------------------------------

void comm_fabric::begin(const comm_message_ptr& x) {
  // Before `enter`: after it, another thread may launch `x` at any time.
  ledger_.move(x->number, comm_stage::requester);
  if (enter(x))
    launch(x);
}

void comm_fabric::launch(const comm_message_ptr& x) {
  auto done = [this, x](const failure& why) { left(x, why); };
  // From here on the fabric owns the content, so everything that is needed
  // later is stored beside it.
  if (!any_placed(*x)) {
    ledger_.move(x->number, comm_stage::tracker);
    ledger_.handled(comm_stage::tracker, x->bytes);
    return inner().send(x->peer, std::move(x->content), std::move(done));
  }
  auto same_node = router_.link_to(x->peer).same_node;
  auto at = same_node ? comm_stage::d2d_send : comm_stage::io_send_watcher;
  ledger_.move(x->number, at);
  ledger_.handled(at, x->bytes);
  auto transfers = await_places(x);
  placing_->send_marked(x->peer, std::move(x->content), std::move(transfers),
                        std::move(done));
}

std::vector<uint64_t> comm_fabric::await_places(const comm_message_ptr& x) {
  std::vector<uint64_t> result(x->content.body.tensors.size());
  std::lock_guard guard{awaited_mutex_};
  for (size_t i = 0; i < x->tensors.size(); ++i) {
    auto& t = x->tensors[i];
    if (!is_placed(t))
      continue;
    result[t.position] = t.id;
    awaited_.emplace(t.id, awaited_tensor{x, i});
  }
  return result;
}

void comm_fabric::left(const comm_message_ptr& x, const failure& why) {
  ledger_.leave(x->number);
  note(flight_kind::transfer_ends, *x);
  if (why) {
    std::lock_guard guard{awaited_mutex_};
    for (auto& t : x->tensors)
      awaited_.erase(t.id);
  }
  x->finish(why);
  if (!leave(x->peer, x->bytes))
    return;
  while (auto y = next(x->peer))
    launch(y);
}

void comm_fabric::placed(rank_id by, uint64_t transfer, bool as_marked) {
  std::lock_guard guard{awaited_mutex_};
  auto i = awaited_.find(transfer);
  // Do not trust what another rank says.
  if (i == awaited_.end() || i->second.of->peer != by)
    return;
  auto& t = i->second.of->tensors[i->second.index];
  if (!as_marked)
    t.rule = comm_rule::no_space;
  ledger_.sent(t.rule);
  awaited_.erase(i);
}

// -- the window ---------------------------------------------------------------

bool comm_fabric::has_room(const line& x, uint64_t bytes) const noexcept {
  auto& now = x.counts;
  return closed_ || now.open == 0
         || (now.open < window_messages
             && now.open_bytes + bytes <= window_bytes);
}

bool comm_fabric::enter(const comm_message_ptr& x) {
  std::lock_guard guard{window_mutex_};
  auto& to = lines_[x->peer];
  // A message overtakes waiting messages only by its priority.
  if (to.counts.queued == 0 && has_room(to, x->bytes)) {
    ++to.counts.open;
    to.counts.open_bytes += x->bytes;
    return true;
  }
  ++to.counts.queued;
  to.counts.queued_bytes += x->bytes;
  to.kept[priority_of(x->content)].push_back(x);
  return false;
}

bool comm_fabric::leave(rank_id peer, uint64_t bytes) {
  std::lock_guard guard{window_mutex_};
  auto& to = lines_[peer];
  --to.counts.open;
  to.counts.open_bytes -= bytes;
  return to.counts.queued > 0 && !std::exchange(to.taking, true);
}

comm_message_ptr comm_fabric::next(rank_id peer) {
  std::lock_guard guard{window_mutex_};
  auto& to = lines_[peer];
  if (to.kept.empty()
      || !has_room(to, to.kept.begin()->second.front()->bytes)) {
    to.taking = false;
    return nullptr;
  }
  auto first = to.kept.begin();
  auto result = std::move(first->second.front());
  first->second.pop_front();
  if (first->second.empty())
    to.kept.erase(first);
  --to.counts.queued;
  to.counts.queued_bytes -= result->bytes;
  ++to.counts.open;
  to.counts.open_bytes += result->bytes;
  return result;
}

void comm_fabric::close(const failure& why) {
  std::vector<comm_message_ptr> all;
  {
    std::lock_guard guard{window_mutex_};
    closed_ = true;
    for (auto& [peer, to] : lines_) {
      for (auto& [priority, kept] : to.kept)
        for (auto& x : kept)
          all.push_back(std::move(x));
      to.kept.clear();
      to.counts.queued = 0;
      to.counts.queued_bytes = 0;
    }
  }
  for (auto& x : all) {
    ledger_.leave(x->number);
    x->finish(why);
  }
}

// -- this rank receives -------------------------------------------------------

std::shared_ptr<std::byte> comm_fabric::place(const arriving_tensor& x) {
  if (!receive_arena_)
    return nullptr;
  ledger_.handled(comm_stage::d2d_allocator, x.nbytes);
  auto result = receive_arena_->take(x.nbytes);
  ledger_.received(result ? comm_rule::device_path : comm_rule::no_space);
  return result;
}

bool comm_fabric::has_placed(const message& x) const noexcept {
  auto outside = [this](auto& t) { return !receive_arena_->contains(t.data); };
  return receive_arena_ && !all_tensors(x, outside);
}

bool comm_fabric::is_crowded() const {
  auto now = receive_arena_->status();
  return now.used > now.capacity / 4 * 3;
}

void comm_fabric::on_message(rank_id from, message x) {
  if (x.kind == message_kind::returned)
    return take_back(from, x);
  if (all_tensors(x, just_rides))
    return deliver(from, std::move(x));
  flight_event came;
  came.kind = flight_kind::tensors_arrived;
  came.peer = static_cast<uint32_t>(from.value);
  came.amount = bytes_of(x);
  board_->record().note(came);
  auto lent = !all_tensors(x, [](auto& t) { return !t.lent; });
  if (lent && !arenas_)
    return inner().peer_lost({error_code::protocol,
                              from,
                              {},
                              "lends a tensor, and no device is here"});
  auto for_devices = is_for_devices(x);
  auto placed = has_placed(x);
  if (!placed && !for_devices && !lent) {
    ledger_.passed_by(comm_stage::postprocessing);
    return deliver(from, std::move(x));
  }
  auto m = std::make_shared<comm_message>();
  m->peer = from;
  m->bytes = bytes_of(x);
  m->content = std::move(x);
  if (lent)
    return turn(comm_stage::d2d_recv, std::move(m));
  if (!placed)
    return turn(comm_stage::postprocessing, std::move(m));
  // A tensor that is kept for long blocks space in the arena, so it is copied
  // out of a crowded one.
  auto copies = for_devices || is_crowded();
  if (router_.link_to(from).same_node) {
    if (copies)
      return turn(comm_stage::d2d_recv, std::move(m));
    ledger_.passed_by(comm_stage::d2d_recv);
  } else {
    ledger_.handled(comm_stage::io_recv_watcher, m->bytes);
    if (copies)
      return turn(comm_stage::cross_node_progress, std::move(m));
    ledger_.passed_by(comm_stage::cross_node_progress);
  }
  deliver(from, std::move(m->content));
}

void comm_fabric::deliver(rank_id from, message x) {
  std::unique_lock guard{delivery_, std::defer_lock};
  // If stages deliver as well as the fabric: let in one at a time, and nothing
  // from a rank after its loss.
  if (router_.has_fabric_arenas() || has_devices_) {
    guard.lock();
    if (lost_.contains(from))
      return;
  }
  if (server_ && is_for_server(x)) {
    run_here received;
    caf::anon_send(server_->actor, from, std::move(x));
  } else {
    listener().on_message(from, std::move(x));
  }
  board_->taken(from);
}

void comm_fabric::on_peer_lost(const failure& x) {
  {
    std::lock_guard guard{awaited_mutex_};
    std::erase_if(awaited_,
                  [&](auto& y) { return y.second.of->peer == x.rank; });
  }
  arenas_.lost(x.rank);
  std::lock_guard guard{delivery_};
  lost_.insert(x.rank);
  listener().on_peer_lost(x);
}

// -- devices ------------------------------------------------------------------

bool comm_fabric::is_away(const message& x) const noexcept {
  return has_devices_ && !all_tensors(x, is_on_host);
}

bool comm_fabric::is_for_devices(const message& x) const noexcept {
  auto here = [](auto& t) { return t.home == device_ref{}; };
  return has_devices_ && !all_tensors(x, here);
}

// -- called by the stages -----------------------------------------------------

bool comm_fabric::takes_turns(comm_stage x) const noexcept {
  switch (x) {
    case comm_stage::d2d_recv:
      return router_.has_fabric_arenas() || arenas_;
    case comm_stage::cross_node_progress:
      return router_.has_fabric_arenas();
    case comm_stage::d2d_send:
      return static_cast<bool>(arenas_);
    case comm_stage::preprocessing:
    case comm_stage::postprocessing:
      return has_devices_;
    default:
      return false;
  }
}

void comm_fabric::handle(comm_stage at, comm_message_ptr x) {
  if (!takes_turns(at))
    throw error{error_code::internal,
                std::string{"nothing is handed over to the "} + to_string(at)};
  if (!x)
    return look_for_late(at);
  if (x->copying) {
    for (auto& t : x->content.body.tensors)
      t.ready = nullptr;
    return go_on(at, std::move(x));
  }
  ledger_.handled(at, x->bytes);
  if (x->number == 0) {
    if (auto why = bring_in(*x))
      return inner().peer_lost(why);
  } else if (auto why = bring_out(*x)) {
    ledger_.leave(x->number);
    return x->finish(why);
  }
  if (!awaits_device(at, x))
    go_on(at, std::move(x));
}

void comm_fabric::go_on(comm_stage at, comm_message_ptr x) {
  if (x->number == 0) {
    x->sources.clear();
    if (!x->borrowed.empty())
      inner().send(x->peer, device_arenas::give_back(x->borrowed));
    return deliver(x->peer, std::move(x->content));
  }
  if (auto why = bring_rest(*x)) {
    ledger_.leave(x->number);
    return x->finish(why);
  }
  for (auto& t : x->tensors)
    if (is_lent(t)) {
      arenas_.lend(x->peer, x->content.body.tensors[t.position]);
      lent_bytes_ += t.nbytes;
      ledger_.sent(t.rule);
    }
  if (at == comm_stage::preprocessing)
    request(x);
  else
    begin(x);
}

// -- the end ------------------------------------------------------------------

void comm_fabric::stop(std::chrono::milliseconds limit) {
  using clock = comm_ledger::clock;
  auto deadline = clock::now() + limit;
  if (!closed_)
    ledger_.wait_until_empty(deadline);
  auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline
                                                           - clock::now());
  inner().stop(std::max(left, std::chrono::milliseconds{0}));
  waits_->close();
  close({error_code::cancelled, self(), {}, "the fabric was stopped"});
  if (actors_)
    actors_->end();
  server_ = nullptr; // no handle of an actor may outlive the actors
}

// -- for those who look -------------------------------------------------------

uint64_t comm_fabric::queued_to(rank_id x) const {
  auto below = dynamic_cast<const credit_fabric*>(&inner());
  auto result = below != nullptr ? below->queued_to(x) : 0;
  std::lock_guard guard{window_mutex_};
  auto i = lines_.find(x);
  return i == lines_.end() ? result : result + i->second.counts.queued;
}

fabric_stats comm_fabric::stats() const {
  auto result = inner().stats();
  result.bytes_sent += lent_bytes_;
  result.bytes_received += borrowed_bytes_;
  return result;
}

comm_report comm_fabric::status() const {
  comm_report result;
  result.rank = self();
  result.device_path = router_.has_fabric_arenas() || arenas_;
  ledger_.write(result);
  if (arenas_)
    result.send_arena = arenas_.status();
  else if (send_arena_)
    result.send_arena = send_arena_->status();
  if (receive_arena_)
    result.receive_arena = receive_arena_->status();
  std::lock_guard guard{window_mutex_};
  for (auto& [peer, to] : lines_) {
    result.peers.push_back(to.counts);
    result.peers.back().peer = peer;
  }
  return result;
}

} // namespace smp
