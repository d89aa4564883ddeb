#include "actors/comm/comm_core.hpp"

#include "actors/comm/message_priority.hpp"

#include <algorithm>
#include <chrono>
#include <new>
#include <string>
#include <utility>

namespace smp {

namespace {

/// Upper bound, in bytes, on memory that is kept for reuse after tensors were
/// copied out of a nearly full receive arena.
constexpr uint64_t pool_limit = uint64_t{256} << 20;

bool on_device_path(const comm_tensor& x) noexcept {
  return x.rule == comm_rule::device_path;
}

bool any_on_device_path(const comm_message& x) noexcept {
  return std::any_of(x.tensors.begin(), x.tensors.end(), on_device_path);
}

/// How often a wait for a device checks whether it should go on.
constexpr std::chrono::milliseconds device_look{50};

std::string device_name(device_ref x) {
  return x == device_ref{}
           ? "host memory"
           : "device " + std::to_string(x.type) + ":" + std::to_string(x.index);
}

} // namespace

comm_core::comm_core(rank_id self, const comm_options& options,
                     comm_outside& outside)
  : self_(self),
    router_(self, options),
    outside_(outside),
    has_devices_(options.devices != nullptr),
    devices_(has_devices_
               ? options.devices
               : std::shared_ptr<device_ops>{std::make_shared<host_ops>()}),
    device_patience_(options.device_patience),
    window_(priority_of),
    pool_(router_.has_device_path() ? pool_limit : 0) {
  if (!router_.has_device_path())
    return;
  send_arena_.emplace(options.send_arena);
  receive_arena_.emplace(options.receive_arena);
}

// -- COMM INITIATOR -----------------------------------------------------------

comm_message_ptr comm_core::make(rank_id to, message x,
                                 fabric::sent_callback done) {
  auto result = std::make_shared<comm_message>();
  result->number = next_++;
  result->peer = to;
  result->done = std::move(done);
  result->bytes = x.body.bytes.size() + tensor_bytes(x.body);
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

void comm_core::send(rank_id to, message x, fabric::sent_callback done) {
  auto m = make(to, std::move(x), std::move(done));
  ledger_.handled(comm_stage::initiator, m->bytes);
  if (!any_on_device_path(*m)) {
    ledger_.enter(*m, comm_stage::requester);
    return take_host_path(m);
  }
  ledger_.enter(*m, comm_stage::d2d_allocator);
  allocate(std::move(m));
}

// -- host path ----------------------------------------------------------------

void comm_core::take_host_path(const comm_message_ptr& x) {
  if (is_away(x->content)) {
    ledger_.move(x->number, comm_stage::preprocessing);
    return outside_.hand_over(comm_stage::preprocessing, x);
  }
  // The fabric refuses tensors on a device that this rank does not have.
  ledger_.passed_by(comm_stage::preprocessing);
  request(x);
}

void comm_core::request(const comm_message_ptr& x) {
  ledger_.handled(comm_stage::requester, x->bytes);
  begin(x);
}

// -- device path: this rank sends ---------------------------------------------

void comm_core::allocate(comm_message_ptr x) {
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
    t.block = send_arena_->take(t.nbytes);
    if (t.block)
      continue;
    t.rule = comm_rule::no_space;
    ledger_.sent(t.rule);
  }
  if (!any_on_device_path(*x))
    return take_host_path(x);
  auto at = same_node ? comm_stage::d2d_send : comm_stage::cross_node_progress;
  ledger_.move(x->number, at);
  outside_.hand_over(at, std::move(x));
}

// -- both paths: this rank sends ----------------------------------------------

void comm_core::begin(const comm_message_ptr& x) {
  // Before `enter`: after it, another thread may launch `x` at any time.
  ledger_.move(x->number, comm_stage::requester);
  if (window_.enter(x))
    launch(x);
}

void comm_core::launch(const comm_message_ptr& x) {
  std::vector<uint64_t> transfers;
  if (!any_on_device_path(*x)) {
    ledger_.move(x->number, comm_stage::tracker);
    ledger_.handled(comm_stage::tracker, x->bytes);
    return outside_.launch(x, {});
  }
  auto same_node = router_.link_to(x->peer).same_node;
  auto at = same_node ? comm_stage::d2d_send : comm_stage::io_send_watcher;
  ledger_.move(x->number, at);
  ledger_.handled(at, x->bytes);
  transfers.resize(x->content.body.tensors.size());
  {
    std::lock_guard guard{awaited_mutex_};
    for (size_t i = 0; i < x->tensors.size(); ++i) {
      auto& t = x->tensors[i];
      if (!on_device_path(t))
        continue;
      transfers[t.position] = t.id;
      awaited_.emplace(t.id, awaited_tensor{x, i});
    }
  }
  outside_.launch(x, std::move(transfers));
}

void comm_core::left(const comm_message_ptr& x, const failure& why) {
  ledger_.leave(x->number);
  if (why) {
    std::lock_guard guard{awaited_mutex_};
    for (auto& t : x->tensors)
      awaited_.erase(t.id);
  }
  x->finish(why);
  if (!window_.leave(x->peer, x->bytes))
    return;
  while (auto next = window_.next(x->peer))
    launch(next);
}

void comm_core::placed(const comm_placed& x) {
  std::lock_guard guard{awaited_mutex_};
  auto i = awaited_.find(x.tensor);
  // Do not trust what another rank says.
  if (i == awaited_.end() || i->second.of->peer != x.by)
    return;
  auto& t = i->second.of->tensors[i->second.index];
  if (!x.as_marked)
    t.rule = comm_rule::no_space;
  ledger_.sent(t.rule);
  awaited_.erase(i);
}

void comm_core::peer_lost(rank_id x) {
  std::lock_guard guard{awaited_mutex_};
  std::erase_if(awaited_, [x](auto& y) { return y.second.of->peer == x; });
}

// -- device path: this rank receives ------------------------------------------

std::shared_ptr<std::byte> comm_core::place(const arriving_tensor& x) {
  if (!receive_arena_)
    return nullptr;
  ledger_.handled(comm_stage::d2d_allocator, x.nbytes);
  auto result = receive_arena_->take(x.nbytes);
  ledger_.received(result ? comm_rule::device_path : comm_rule::no_space);
  return result;
}

std::vector<size_t> comm_core::in_arena(const message& x) const {
  std::vector<size_t> result;
  if (receive_arena_)
    for (size_t i = 0; i < x.body.tensors.size(); ++i)
      if (receive_arena_->contains(x.body.tensors[i].data))
        result.push_back(i);
  return result;
}

bool comm_core::is_crowded() const {
  auto now = receive_arena_->status();
  return now.used > now.capacity / 4 * 3;
}

void comm_core::arrived(rank_id from, message x) {
  auto for_devices = is_for_devices(x);
  auto placed = !in_arena(x).empty();
  if (!placed && !for_devices) {
    ledger_.passed_by(comm_stage::postprocessing);
    return outside_.deliver(from, std::move(x));
  }
  auto m = std::make_shared<comm_message>();
  m->peer = from;
  m->bytes = x.body.bytes.size() + tensor_bytes(x.body);
  m->content = std::move(x);
  if (!placed)
    return outside_.hand_over(comm_stage::postprocessing, std::move(m));
  // A tensor that is kept for long blocks space in the arena, so it is copied
  // out of a crowded one.
  auto copies = for_devices || is_crowded();
  if (router_.link_to(from).same_node) {
    if (copies)
      return outside_.hand_over(comm_stage::d2d_recv, std::move(m));
    ledger_.passed_by(comm_stage::d2d_recv);
  } else {
    ledger_.handled(comm_stage::io_recv_watcher, m->bytes);
    if (copies)
      return outside_.hand_over(comm_stage::cross_node_progress, std::move(m));
    ledger_.passed_by(comm_stage::cross_node_progress);
  }
  outside_.deliver(from, std::move(m->content));
}

// -- devices ------------------------------------------------------------------

bool comm_core::is_away(const message& x) const noexcept {
  auto away = [](auto& t) { return t.device != device_ref{} || t.ready; };
  auto& tensors = x.body.tensors;
  return has_devices_ && std::any_of(tensors.begin(), tensors.end(), away);
}

bool comm_core::is_for_devices(const message& x) const noexcept {
  auto elsewhere = [](auto& t) { return t.home != device_ref{}; };
  auto& tensors = x.body.tensors;
  return has_devices_ && std::any_of(tensors.begin(), tensors.end(), elsewhere);
}

failure comm_core::await(comm_message& x) const {
  using clock = comm_ledger::clock;
  using std::chrono::milliseconds;
  auto deadline = clock::now() + device_patience_;
  auto& tensors = x.content.body.tensors;
  for (size_t i = 0; i < tensors.size(); ++i) {
    auto& t = tensors[i];
    while (t.ready) {
      auto left = std::chrono::ceil<milliseconds>(deadline - clock::now());
      if (t.ready->wait(std::clamp(left, milliseconds{0}, device_look)))
        t.ready.reset();
      else if (closed_)
        return {error_code::cancelled, self_, {}, "the fabric was stopped"};
      else if (left <= milliseconds{0})
        return {error_code::transport,
                self_,
                {},
                "tensor " + std::to_string(i) + " of a message to rank "
                  + std::to_string(x.peer.value) + ", of "
                  + device_name(t.home == device_ref{} ? t.device : t.home)
                  + ", is not ready after "
                  + std::to_string(device_patience_.count()) + " ms"};
    }
  }
  return {};
}

failure comm_core::bring_out(comm_message& x) try {
  auto& tensors = x.content.body.tensors;
  std::vector<std::shared_ptr<std::byte>> blocks(tensors.size());
  for (auto& t : x.tensors)
    blocks[t.position] = std::move(t.block);
  auto bring = [&](size_t i) {
    auto& t = tensors[i];
    auto to = std::move(blocks[i]);
    if (!to)
      to = devices_->allocate({}, t.nbytes);
    auto home = t.device == device_ref{} ? t.home : t.device;
    t = devices_->copy(t, std::move(to), {});
    t.home = home;
  };
  for (size_t i = 0; i < tensors.size(); ++i)
    if (tensors[i].device != device_ref{})
      bring(i);
  if (auto why = await(x))
    return why;
  // Now the contents of tensors in host memory have been computed, too.
  for (size_t i = 0; i < tensors.size(); ++i)
    if (blocks[i])
      bring(i);
  return {};
} catch (const error& e) {
  return e.cause();
} catch (const std::bad_alloc&) {
  return {error_code::transport, self_, {}, "no memory to copy a tensor"};
}

void comm_core::bring_in(message& x) try {
  for (auto& t : x.body.tensors) {
    auto where = t.home == device_ref{} ? std::nullopt : devices_->here(t.home);
    if (where) {
      t = devices_->copy(t, devices_->allocate(*where, t.nbytes), *where);
      t.home = {};
    } else if (receive_arena_ && receive_arena_->contains(t.data)) {
      t = devices_->copy(t, pool_.take(t.nbytes), {});
    }
  }
} catch (const std::bad_alloc&) {
  // The tensor stays in host memory,
} catch (const error&) {
  // and its `home` still says where it belongs.
}

// -- called by the actors -----------------------------------------------------

bool comm_core::takes_turns(comm_stage x) const noexcept {
  switch (x) {
    case comm_stage::d2d_recv:
    case comm_stage::cross_node_progress:
      return has_device_path();
    case comm_stage::d2d_send:
      return has_device_path() && has_devices_;
    case comm_stage::preprocessing:
    case comm_stage::postprocessing:
      return has_devices_;
    default:
      return false;
  }
}

void comm_core::handle(comm_stage at, comm_message_ptr x) {
  if (!takes_turns(at))
    throw error{error_code::internal,
                std::string{"nothing is handed over to the "} + to_string(at)};
  // `launch` counts the messages of D2D SEND.
  if (at != comm_stage::d2d_send)
    ledger_.handled(at, x->bytes);
  if (x->number == 0) {
    bring_in(x->content);
    return outside_.deliver(x->peer, std::move(x->content));
  }
  if (auto why = bring_out(*x)) {
    ledger_.leave(x->number);
    return x->finish(why);
  }
  if (at == comm_stage::preprocessing)
    request(x);
  else
    begin(x);
}

// -- the end ------------------------------------------------------------------

void comm_core::close(const failure& why) {
  closed_ = true;
  for (auto& x : window_.close()) {
    ledger_.leave(x->number);
    x->finish(why);
  }
}

comm_report comm_core::status() const {
  comm_report result;
  result.rank = self_;
  result.device_path = has_device_path();
  ledger_.write(result);
  if (send_arena_)
    result.send_arena = send_arena_->status();
  if (receive_arena_)
    result.receive_arena = receive_arena_->status();
  result.peers = window_.status();
  return result;
}

} // namespace smp
