#include "actors/comm/comm_core.hpp"

#include "actors/comm/message_priority.hpp"

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

namespace smp {

namespace {

/// What is copied out of a receive arena that is nearly full is kept for the
/// next ones, up to this many bytes.
constexpr uint64_t pool_limit = uint64_t{256} << 20;

bool on_device_path(const comm_tensor& x) noexcept {
  return x.rule == comm_rule::device_path;
}

bool any_on_device_path(const comm_message& x) noexcept {
  return std::any_of(x.tensors.begin(), x.tensors.end(), on_device_path);
}

} // namespace

comm_core::comm_core(rank_id self, const comm_options& options,
                     comm_outside& outside)
  : self_(self),
    router_(self, options),
    outside_(outside),
    window_(priority_of),
    pool_(options.force_device_path ? pool_limit : 0) {
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
  // Tensors in host memory; what lies elsewhere, the fabric refuses.
  ledger_.passed_by(comm_stage::preprocessing);
  ledger_.handled(comm_stage::requester, x->bytes);
  begin(x);
}

// -- device path: this rank sends ---------------------------------------------

void comm_core::allocate(comm_message_ptr x) {
  // On the same node the receiver reads them where they are.
  if (router_.link_to(x->peer).same_node) {
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
  ledger_.move(x->number, comm_stage::cross_node_progress);
  outside_.hand_over(comm_stage::cross_node_progress, std::move(x));
}

void comm_core::copy_in(comm_message& x) {
  for (auto& t : x.tensors) {
    if (!t.block)
      continue;
    auto& to = x.content.body.tensors[t.position];
    std::memcpy(t.block.get(), to.data, t.nbytes);
    to.data = t.block.get();
    to.owner = std::move(t.block);
  }
}

// -- both paths: this rank sends ----------------------------------------------

void comm_core::begin(const comm_message_ptr& x) {
  // Given to the window, `x` may be launched by another thread at once.
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
  // Nothing that another rank says is believed.
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
  if (in_arena(x).empty()) {
    ledger_.passed_by(comm_stage::postprocessing);
    return outside_.deliver(from, std::move(x));
  }
  auto m = std::make_shared<comm_message>();
  m->peer = from;
  m->bytes = x.body.bytes.size() + tensor_bytes(x.body);
  m->content = std::move(x);
  // Who keeps a tensor for long would keep others out: from a crowded arena it
  // is copied.
  auto crowded = is_crowded();
  if (router_.link_to(from).same_node) {
    if (crowded)
      return outside_.hand_over(comm_stage::d2d_recv, std::move(m));
    ledger_.passed_by(comm_stage::d2d_recv);
  } else {
    ledger_.handled(comm_stage::io_recv_watcher, m->bytes);
    if (crowded)
      return outside_.hand_over(comm_stage::cross_node_progress, std::move(m));
    ledger_.passed_by(comm_stage::cross_node_progress);
  }
  outside_.deliver(from, std::move(m->content));
}

void comm_core::copy_out(comm_message& x) try {
  for (auto i : in_arena(x.content)) {
    auto& t = x.content.body.tensors[i];
    auto block = pool_.take(t.nbytes);
    std::memcpy(block.get(), t.data, t.nbytes);
    t.data = block.get();
    t.owner = std::move(block);
  }
} catch (const std::bad_alloc&) {
  // Then it stays where it is.
}

// -- called by the actors -----------------------------------------------------

void comm_core::handle(comm_stage at, comm_message_ptr x) {
  switch (at) {
    case comm_stage::d2d_recv:
    case comm_stage::cross_node_progress:
      ledger_.handled(at, x->bytes);
      if (x->number != 0) { // one to send
        copy_in(*x);
        return begin(x);
      }
      copy_out(*x);
      return outside_.deliver(x->peer, std::move(x->content));
    default:
      throw error{error_code::internal,
                  std::string{"nothing is handed over to the "}
                    + to_string(at)};
  }
}

// -- the end ------------------------------------------------------------------

void comm_core::close(const failure& why) {
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
