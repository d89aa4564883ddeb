// How messages arrive: units arrive in any order and become whole messages.

#include "transport/ucx/engine.hpp"
#include "transport/ucx/failures.hpp"

#include <algorithm>
#include <cstring>

namespace smp {

using namespace ucx;

namespace {

/// What a rank may have in flight to this one, in messages and bytes; more is a
/// breach of protocol. The communication stages of a sender launch 8 messages
/// with large tensors at a time, of 128 MB together or one alone
/// (actors/comm/comm_fabric.cpp), and at most 64 small units are in flight: far
/// less than this.
constexpr size_t partial_limit = 1024;
constexpr uint64_t partial_bytes_limit = uint64_t{512} << 20;

} // namespace

// -- C callbacks: nothing may be thrown through UCX ---------------------------

ucs_status_t ucx_fabric::engine::on_active_message(
  void* self, const void* header, size_t header_size, void* data, size_t size,
  const ucp_am_recv_param_t* param) {
  auto rendezvous = (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0;
  return static_cast<engine*>(self)->arrived(
    {static_cast<const std::byte*>(header), header_size},
    {data, size, rendezvous});
}

void ucx_fabric::engine::on_received(void* request, ucs_status_t status, size_t,
                                     void* operation) {
  std::unique_ptr<receive_operation> x{
    static_cast<receive_operation*>(operation)};
  ucp_request_free(request);
  --x->self.open_receives_;
  x->self.guarded(x->from, [&] { x->self.received(*x, status); });
}

// -- units --------------------------------------------------------------------

ucs_status_t ucx_fabric::engine::arrived(std::span<const std::byte> bytes,
                                         incoming_data data) {
  auto header = read_header(bytes, options_.token);
  if (!header || header->from >= peers_.size()
      || rank_id{header->from} == self_) {
    ++messages_refused_;
    return data.rendezvous ? UCS_ERR_REJECTED : UCS_OK;
  }
  auto& from = peers_[header->from];
  if (closing_ || from.state != peer_state::connected)
    return data.rendezvous ? UCS_ERR_CANCELED : UCS_OK;
  auto result = UCS_OK;
  guarded(from, [&] {
    if (header->kind == unit_kind::goodbye)
      return left(from, header->number);
    if (header->kind == unit_kind::placed) {
      if (places_ != nullptr)
        places_->placed(from.rank, header->number, header->offset != 0);
      return;
    }
    if (header->data == data_kind::bytes)
      result = receive_data(from, *header, data);
    if (header->kind == unit_kind::description)
      described(from, header->number, bytes.subspan(header_size));
  });
  return result;
}

ucs_status_t ucx_fabric::engine::receive_data(peer& from,
                                              const unit_header& header,
                                              incoming_data data) {
  auto x = std::make_unique<receive_operation>(
    receive_operation{*this, from, header, nullptr, data.size});
  auto to = place_for(*x);
  if (to == nullptr)
    return UCS_OK;
  if (!data.rendezvous) {
    if (data.size > 0)
      std::memcpy(to, data.pointer, data.size);
    received(*x, UCS_OK);
    return UCS_OK;
  }
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
  param.cb.recv_am = on_received;
  param.user_data = x.get();
  auto request = ucp_am_recv_data_nbx(worker_->get(), data.pointer, to,
                                      data.size, &param);
  if (UCS_PTR_IS_PTR(request)) {
    x.release(); // `on_received` deletes it
    ++open_receives_;
  } else {
    guarded(from, [&] { received(*x, UCS_PTR_STATUS(request)); });
  }
  // The receive owns the descriptor now, whatever was thrown.
  return UCS_INPROGRESS;
}

std::byte* ucx_fabric::engine::place_for(receive_operation& x) {
  auto& header = x.header;
  if (header.kind == unit_kind::long_description) {
    auto a = assembly_of(x.from, header.number);
    if (a == nullptr || !announce(x.from, *a, x.size))
      return nullptr;
    x.block = pool_.take(x.size);
    return x.block.get();
  }
  if (header.tensor_size > tensor_limit || header.offset > header.tensor_size
      || x.size > header.tensor_size - header.offset) {
    refuse(x.from, error_code::protocol,
           "sent a part that reaches beyond its tensor");
    return nullptr;
  }
  auto p = part_of(x.from, header);
  if (p == nullptr)
    return nullptr;
  x.block = p->block;
  return p->block.get() + header.offset;
}

auto ucx_fabric::engine::part_of(peer& from, const unit_header& header)
  -> part* {
  if (header.tensor_size <= packed_limit) {
    refuse(from, error_code::protocol,
           "sent a tensor apart that belongs into its description");
    return nullptr;
  }
  auto a = assembly_of(from, header.number);
  if (a == nullptr)
    return nullptr;
  if (auto i = a->parts.find(header.tensor); i != a->parts.end()) {
    auto& p = i->second;
    if (p.size == header.tensor_size && p.transfer == header.transfer)
      return &p;
    refuse(from, error_code::protocol,
           "sent parts that differ about the size or name of their tensor");
    return nullptr;
  }
  if (!announce(from, *a, header.tensor_size))
    return nullptr;
  part p;
  if (header.transfer != 0 && places_ != nullptr)
    p.block = places_->place({from.rank, header.transfer, header.tensor_size});
  p.as_marked = p.block != nullptr;
  if (!p.block)
    p.block = pool_.take(header.tensor_size);
  p.size = header.tensor_size;
  p.transfer = header.transfer;
  return &a->parts.emplace(header.tensor, std::move(p)).first->second;
}

auto ucx_fabric::engine::assembly_of(peer& from, uint64_t number) -> assembly* {
  if (auto i = from.partial.find(number); i != from.partial.end())
    return &i->second;
  if (from.partial.size() >= partial_limit) {
    refuse(from, error_code::protocol,
           "sent parts of more than " + std::to_string(partial_limit)
             + " messages and completed none");
    return nullptr;
  }
  return &from.partial[number];
}

/// Counted before memory is allocated, because claims are cheap.
bool ucx_fabric::engine::announce(peer& from, assembly& to, uint64_t size) {
  to.bytes += size;
  from.partial_bytes += size;
  if (from.partial_bytes <= partial_bytes_limit)
    return true;
  // One message alone may be larger.
  uint64_t largest = 0;
  for (auto& [number, x] : from.partial)
    largest = std::max(largest, x.bytes);
  if (from.partial_bytes - largest <= partial_bytes_limit)
    return true;
  refuse(from, error_code::protocol,
         "announced " + std::to_string(from.partial_bytes)
           + " bytes in several messages at once");
  return false;
}

void ucx_fabric::engine::forget(peer& from, uint64_t number) {
  if (auto i = from.partial.find(number); i != from.partial.end()) {
    from.partial_bytes -= i->second.bytes;
    from.partial.erase(i);
  }
}

void ucx_fabric::engine::received(receive_operation& x, ucs_status_t status) {
  auto& from = x.from;
  if (status != UCS_OK) {
    // A hung rank that resumes might still write there.
    quarantine_.push_back(x.block);
    refuse(from, failure_of(status, from.rank, during::receiving));
    return;
  }
  if (from.state != peer_state::connected)
    return;
  auto number = x.header.number;
  if (x.header.kind == unit_kind::long_description) {
    described(from, number, {x.block.get(), x.size});
    return;
  }
  auto& a = from.partial[number];
  auto& p = a.parts[x.header.tensor];
  p.received += x.size;
  if (p.received == p.size) {
    ++a.complete_parts;
    tell_placed(from, p);
    finish_if_complete(from, number);
  } else if (p.received > p.size) {
    refuse(from, error_code::protocol, "sent a part of a tensor twice");
  }
}

void ucx_fabric::engine::tell_placed(peer& to, const part& x) {
  if (x.transfer == 0)
    return;
  unit_header header;
  header.kind = unit_kind::placed;
  header.from = static_cast<uint32_t>(self_.value);
  header.number = x.transfer;
  header.offset = x.as_marked ? 1 : 0;
  to.small.front().push_back({nullptr, header, nullptr, 0});
}

// -- messages -----------------------------------------------------------------

void ucx_fabric::engine::described(peer& from, uint64_t number,
                                   std::span<const std::byte> bytes) {
  auto what = read_description(bytes, pool_);
  if (what.apart.empty()) {
    forget(from, number);
    deliver(from, std::move(what.content));
    return;
  }
  auto a = assembly_of(from, number);
  if (a == nullptr)
    return;
  if (a->what) {
    refuse(from, error_code::protocol, "described a message twice");
    return;
  }
  a->what = std::move(what);
  finish_if_complete(from, number);
}

void ucx_fabric::engine::finish_if_complete(peer& from, uint64_t number) {
  auto i = from.partial.find(number);
  auto& a = i->second;
  if (!a.what || a.complete_parts < a.what->apart.size())
    return;
  auto& tensors = a.what->content.body.tensors;
  // Checked before any block is moved: parts of a refused message still arrive.
  for (auto index : a.what->apart) {
    auto p = a.parts.find(index);
    if (p == a.parts.end() || p->second.size != tensors[index].nbytes
        || p->second.received != p->second.size) {
      refuse(from, error_code::protocol,
             "sent parts that do not fit the description of their message");
      return;
    }
  }
  for (auto index : a.what->apart) {
    auto& t = tensors[index];
    t.owner = std::move(a.parts.at(index).block);
    t.data = t.owner.get();
  }
  auto content = std::move(a.what->content);
  forget(from, number);
  deliver(from, std::move(content));
}

void ucx_fabric::engine::deliver(peer& from, message x) {
  ++messages_received_;
  bytes_received_ += x.body.bytes.size() + tensor_bytes(x.body);
  news_.emplace_back(arrival{from.rank, std::move(x)});
}

// -- trouble ------------------------------------------------------------------

void ucx_fabric::engine::refuse(peer& from, error_code code, std::string text) {
  refuse(from, {code, from.rank, {}, std::move(text)});
}

void ucx_fabric::engine::refuse(peer& from, failure why) {
  if (from.state == peer_state::connected)
    failed_.emplace_back(&from, std::move(why));
}

} // namespace smp
