// How messages leave: units, queues, windows.

#include "transport/ucx/engine.hpp"
#include "transport/ucx/failures.hpp"

#include <algorithm>

namespace smp {

using namespace ucx;

namespace {

/// Rendezvous that one rank may have open to another: more are not faster. Each
/// takes a block of the receiver: with few, caches still have the block that is
/// written next (16 MB: 10 GB/s instead of 6).
constexpr unsigned bulk_window = 8;
constexpr uint64_t bulk_window_bytes = uint64_t{4} << 20;

/// Small messages have no acknowledgement, and a full queue in shared memory
/// keeps its senders busy. So every so often one is sent as a rendezvous: its
/// completion says that all before it were taken out of the queue.
constexpr unsigned marker_window = 2;

constexpr std::byte marker_byte{};

} // namespace

// -- any thread ---------------------------------------------------------------

void ucx_fabric::engine::send(rank_id to, message x,
                              std::vector<uint64_t> transfers,
                              sent_callback done) {
  failure why;
  for (auto& t : x.body.tensors) {
    if (t.device != device_ref{})
      why = {error_code::unsupported,
             self_,
             {},
             "UCX moves tensors in host memory only"};
    else if (t.nbytes > tensor_limit)
      why = {error_code::unsupported,
             self_,
             {},
             "a tensor of " + std::to_string(t.nbytes) + " bytes"};
  }
  if (to.value >= peers_.size())
    why = {error_code::transport,
           self_,
           {},
           "there is no rank " + std::to_string(to.value)};
  auto out = std::make_shared<outgoing>();
  out->to = to;
  if (options_.priority)
    out->priority = std::min<uint8_t>(options_.priority(x), priorities - 1);
  out->content = std::move(x);
  out->transfers = std::move(transfers);
  out->done = std::move(done);
  if (!why) {
    auto units = to == self_ ? std::vector<unit>{} : make_units(out);
    std::lock_guard guard{queue_mutex_};
    if (!started_ || stop_requested_)
      why = started_
              ? stopped()
              : failure{
                error_code::cancelled, self_, {}, "the fabric was not started"};
    else if (to == self_)
      queued_self_sends_.push_back(out);
    else
      queued_sends_.emplace_back(out, std::move(units));
  }
  if (why) {
    out->why = why;
    tell_sent(*out);
  } else if (to == self_) {
    wake();
  } else {
    post_from_here();
  }
}

std::vector<ucx_fabric::engine::unit>
ucx_fabric::engine::make_units(const outgoing_ptr& x) {
  std::vector<unit> result;
  unit_header header;
  header.from = static_cast<uint32_t>(self_.value);
  header.number = next_number_++;
  x->description = write_description(x->content, header_size);
  if (x->description.size() <= max_header_) {
    result.push_back({x, header, nullptr, 0});
  } else {
    header.kind = unit_kind::long_description;
    header.data = data_kind::bytes;
    result.push_back({x, header, x->description.data() + header_size,
                      x->description.size() - header_size});
  }
  auto& tensors = x->content.body.tensors;
  for (uint32_t i = 0; i < tensors.size(); ++i) {
    auto& t = tensors[i];
    if (is_packed(t))
      continue;
    for (uint64_t offset = 0; offset < t.nbytes; offset += chunk_size) {
      // The first chunk travels with the description if that leaves room.
      if (result.size() > 1 || result[0].size > 0)
        result.push_back({x, header, nullptr, 0});
      auto& u = result.back();
      if (result.size() > 1)
        u.header.kind = unit_kind::chunk;
      u.header.data = data_kind::bytes;
      u.header.tensor = i;
      u.header.offset = offset;
      u.header.tensor_size = t.nbytes;
      u.header.transfer = x->transfers.empty() ? 0 : x->transfers[i];
      u.data = static_cast<const std::byte*>(t.data) + offset;
      u.size = std::min(chunk_size, t.nbytes - offset);
    }
  }
  x->open = result.size();
  return result;
}

uint64_t ucx_fabric::engine::queued_to(rank_id x) const {
  std::lock_guard guard{worker_mutex_};
  if (x.value >= peers_.size())
    return 0;
  auto& to = peers_[x.value];
  auto result = to.bulk.size();
  for (auto& queue : to.small)
    result += queue.size();
  return result;
}

bool ucx_fabric::engine::queue_is_empty() {
  std::lock_guard guard{queue_mutex_};
  return queued_sends_.empty();
}

void ucx_fabric::engine::post_from_here() {
  do {
    std::vector<outgoing_ptr> finished;
    bool must_wake = false;
    {
      worker_lock lock{worker_mutex_, std::try_to_lock};
      // The thread that holds it checks the queue after it unlocks.
      if (!lock || !worker_)
        return;
      posted_open_ = false;
      take_queued_sends();
      finished.swap(finished_);
      // The progress thread armed the worker before it fell asleep. If that
      // still holds, completions of what was posted will wake it by themselves.
      if (asleep_)
        must_wake = has_failed()
                    || (posted_open_
                        && ucp_worker_arm(worker_->get()) != UCS_OK);
    }
    if (must_wake)
      wake();
    for (auto& x : finished)
      tell_sent(*x);
  } while (!queue_is_empty());
}

void ucx_fabric::engine::tell_sent(outgoing& x) {
  // Release the tensors before their owner hears that they may go.
  x.content = {};
  if (x.done)
    std::exchange(x.done, {})(x.why);
}

void ucx_fabric::engine::wake() {
  if (!wake_posted_.exchange(true))
    woken_.notify();
}

// -- whoever has the worker ---------------------------------------------------

void ucx_fabric::engine::take_queued_sends() {
  decltype(queued_sends_) queued;
  {
    std::lock_guard guard{queue_mutex_};
    queued.swap(queued_sends_);
  }
  for (auto& [x, units] : queued) {
    auto& to = peers_[x->to.value];
    if (closing_ || to.state != peer_state::connected) {
      x->why = closing_ ? stopped() : to.why;
      finished_.push_back(std::move(x));
      continue;
    }
    ++messages_sent_;
    bytes_sent_ += x->content.body.bytes.size() + tensor_bytes(x->content.body);
    for (auto& u : units) {
      auto first = u.header.kind == unit_kind::description
                     ? x->description.size()
                     : header_size;
      auto& queue = first + u.size <= to.eager_limit ? to.small[x->priority]
                                                     : to.bulk;
      queue.push_back(std::move(u));
    }
    post_ready(to);
  }
}

void ucx_fabric::engine::post_ready(peer& to) {
  while (to.markers_open < marker_window) {
    auto next = to.next_small();
    if (next == nullptr)
      break;
    auto x = std::move(next->front());
    next->pop_front();
    post(to, std::move(x), false);
  }
  while (!to.bulk.empty() && to.bulk_open < bulk_window
         && (to.bulk_open == 0
             || to.bulk_bytes + to.bulk.front().size <= bulk_window_bytes)) {
    auto x = std::move(to.bulk.front());
    to.bulk.pop_front();
    post(to, std::move(x), true);
  }
}

void ucx_fabric::engine::post(peer& to, unit x, bool bulk) {
  auto marker = !bulk && ++to.small_since_marker >= marker_interval_;
  auto operation = std::make_unique<send_operation>(
    send_operation{*this, to, std::move(x), bulk, marker});
  auto& u = operation->what;
  if (bulk) {
    ++to.bulk_open;
    to.bulk_bytes += u.size;
  } else if (marker) {
    to.small_since_marker = 0;
    ++to.markers_open;
    if (u.header.data == data_kind::none) {
      u.header.data = data_kind::marker;
      u.data = &marker_byte;
      u.size = 1;
    }
  }
  // UCX reads the header until the operation completes.
  std::span<std::byte> header = operation->header;
  if (u.header.kind == unit_kind::description)
    header = u.of->description;
  write_header(header, u.header, options_.token);
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA
                       | UCP_OP_ATTR_FIELD_FLAGS;
  param.cb.send = on_sent;
  param.user_data = operation.get();
  param.flags = bulk || marker ? UCP_AM_SEND_FLAG_RNDV : UCP_AM_SEND_FLAG_EAGER;
  auto request = ucp_am_send_nbx(to.endpoint, active_message_id, header.data(),
                                 header.size(), u.data, u.size, &param);
  if (UCS_PTR_IS_PTR(request)) {
    operation.release(); // `on_sent` deletes it
    ++open_sends_;
    posted_open_ = true;
  } else {
    sent(*operation, UCS_PTR_STATUS(request));
  }
}

void ucx_fabric::engine::on_sent(void* request, ucs_status_t status,
                                 void* operation) {
  std::unique_ptr<send_operation> x{static_cast<send_operation*>(operation)};
  ucp_request_free(request);
  --x->self.open_sends_;
  x->self.guarded(x->to, [&] { x->self.sent(*x, status); });
}

void ucx_fabric::engine::sent(send_operation& x, ucs_status_t status) {
  if (x.bulk) {
    --x.to.bulk_open;
    x.to.bulk_bytes -= x.what.size;
  }
  if (x.marker)
    --x.to.markers_open;
  if (status == UCS_OK) {
    drop(x.what, {});
    return;
  }
  auto why = closing_ ? stopped()
             : x.to.state == peer_state::connected
               ? failure_of(status, x.to.rank, during::sending)
               : x.to.why;
  if (x.what.of)
    for (auto& t : x.what.of->content.body.tensors)
      quarantine_.push_back(t.owner);
  // A lost message would leave a thread waiting for it.
  if (x.to.state == peer_state::connected)
    failed_.emplace_back(&x.to, why);
  drop(x.what, why);
}

void ucx_fabric::engine::drop(unit& x, const failure& why) {
  if (!x.of)
    return;
  if (why && !x.of->why)
    x.of->why = why;
  if (--x.of->open == 0)
    finished_.push_back(std::move(x.of));
}

void ucx_fabric::engine::drop_queued(peer& to, const failure& why) {
  auto drop_all = [&](std::deque<unit>& queue) {
    for (auto& x : queue)
      drop(x, why);
    queue.clear();
  };
  for (auto& x : to.small)
    drop_all(x);
  drop_all(to.bulk);
}

} // namespace smp
