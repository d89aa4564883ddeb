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

void ucx_fabric::engine::send(rank_id to, message content,
                              std::vector<uint64_t> transfers,
                              sent_callback done) {
  failure why;
  for (auto& tensor : content.body.tensors) {
    if (tensor.device != device_ref{})
      why = {error_code::unsupported,
             self_,
             {},
             "UCX moves tensors in host memory only"};
    else if (tensor.nbytes > tensor_limit)
      why = {error_code::unsupported,
             self_,
             {},
             "a tensor of " + std::to_string(tensor.nbytes) + " bytes"};
  }
  if (to.value >= peers_.size())
    why = {error_code::transport,
           self_,
           {},
           "there is no rank " + std::to_string(to.value)};
  auto out = std::make_shared<outgoing>();
  out->to = to;
  if (options_.priority)
    out->priority = std::min<uint8_t>(options_.priority(content),
                                      priorities - 1);
  out->content = std::move(content);
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
ucx_fabric::engine::make_units(const outgoing_ptr& out) {
  std::vector<unit> result;
  unit_header header;
  header.from = static_cast<uint32_t>(self_.value);
  header.number = next_number_++;
  out->description = write_description(out->content, header_size);
  if (out->description.size() <= max_header_) {
    result.push_back({out, header, nullptr, 0});
  } else {
    header.kind = unit_kind::long_description;
    header.data = data_kind::bytes;
    result.push_back({out, header, out->description.data() + header_size,
                      out->description.size() - header_size});
  }
  auto& tensors = out->content.body.tensors;
  for (uint32_t index = 0; index < tensors.size(); ++index) {
    auto& tensor = tensors[index];
    if (is_packed(tensor))
      continue;
    for (uint64_t offset = 0; offset < tensor.nbytes; offset += chunk_size) {
      // The first chunk travels with the description if that leaves room.
      if (result.size() > 1 || result[0].size > 0)
        result.push_back({out, header, nullptr, 0});
      auto& next = result.back();
      if (result.size() > 1)
        next.header.kind = unit_kind::chunk;
      next.header.data = data_kind::bytes;
      next.header.tensor = index;
      next.header.offset = offset;
      next.header.tensor_size = tensor.nbytes;
      next.header.transfer = out->transfers.empty() ? 0 : out->transfers[index];
      next.data = static_cast<const std::byte*>(tensor.data) + offset;
      next.size = std::min(chunk_size, tensor.nbytes - offset);
    }
  }
  out->open = result.size();
  return result;
}

uint64_t ucx_fabric::engine::queued_to(rank_id rank) const {
  std::lock_guard guard{worker_mutex_};
  if (rank.value >= peers_.size())
    return 0;
  auto& to = peers_[rank.value];
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
  for (auto& [out, units] : queued) {
    auto& to = peers_[out->to.value];
    if (closing_ || to.state != peer_state::connected) {
      out->why = closing_ ? stopped() : to.why;
      finished_.push_back(std::move(out));
      continue;
    }
    ++messages_sent_;
    bytes_sent_ += out->content.body.bytes.size()
                   + tensor_bytes(out->content.body);
    for (auto& part : units) {
      auto first = part.header.kind == unit_kind::description
                     ? out->description.size()
                     : header_size;
      auto& queue = first + part.size <= to.eager_limit
                      ? to.small[out->priority]
                      : to.bulk;
      queue.push_back(std::move(part));
    }
    post_ready(to);
  }
}

void ucx_fabric::engine::post_ready(peer& to) {
  while (to.markers_open < marker_window) {
    auto next = to.next_small();
    if (next == nullptr)
      break;
    auto first = std::move(next->front());
    next->pop_front();
    post(to, std::move(first), false);
  }
  while (!to.bulk.empty() && to.bulk_open < bulk_window
         && (to.bulk_open == 0
             || to.bulk_bytes + to.bulk.front().size <= bulk_window_bytes)) {
    auto first = std::move(to.bulk.front());
    to.bulk.pop_front();
    post(to, std::move(first), true);
  }
}

void ucx_fabric::engine::post(peer& to, unit what, bool bulk) {
  auto marker = !bulk && ++to.small_since_marker >= marker_interval_;
  auto operation = std::make_unique<send_operation>(
    send_operation{*this, to, std::move(what), bulk, marker});
  auto& sending = operation->what;
  if (bulk) {
    ++to.bulk_open;
    to.bulk_bytes += sending.size;
  } else if (marker) {
    to.small_since_marker = 0;
    ++to.markers_open;
    if (sending.header.data == data_kind::none) {
      sending.header.data = data_kind::marker;
      sending.data = &marker_byte;
      sending.size = 1;
    }
  }
  // UCX reads the header until the operation completes.
  std::span<std::byte> header = operation->header;
  if (sending.header.kind == unit_kind::description)
    header = sending.of->description;
  write_header(header, sending.header, options_.token);
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA
                       | UCP_OP_ATTR_FIELD_FLAGS;
  param.cb.send = on_sent;
  param.user_data = operation.get();
  param.flags = bulk || marker ? UCP_AM_SEND_FLAG_RNDV : UCP_AM_SEND_FLAG_EAGER;
  auto request = ucp_am_send_nbx(to.endpoint, active_message_id, header.data(),
                                 header.size(), sending.data, sending.size,
                                 &param);
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

void ucx_fabric::engine::sent(send_operation& operation, ucs_status_t status) {
  if (operation.bulk) {
    --operation.to.bulk_open;
    operation.to.bulk_bytes -= operation.what.size;
  }
  if (operation.marker)
    --operation.to.markers_open;
  if (status == UCS_OK) {
    drop(operation.what, {});
    return;
  }
  auto why = closing_ ? stopped()
             : operation.to.state == peer_state::connected
               ? failure_of(status, operation.to.rank, during::sending)
               : operation.to.why;
  if (operation.what.of)
    for (auto& tensor : operation.what.of->content.body.tensors)
      quarantine_.push_back(tensor.owner);
  // A lost message would leave a thread waiting for it.
  if (operation.to.state == peer_state::connected)
    failed_.emplace_back(&operation.to, why);
  drop(operation.what, why);
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
