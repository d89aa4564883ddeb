#include "runtime/session/groups.hpp"

#include "runtime/collectives/data_group.hpp"
#include "runtime/collectives/tensor_collectives.hpp"
#include "runtime/session/rank_runtime.hpp"
#include "runtime/session/session.hpp"

#include <c10/util/Type.h>

#include <algorithm>

namespace smp {

namespace {

/// The name of all values between two ranks: they match in order, whichever way
/// a rank is named.
constexpr const char* value_name = "smp.send";

rank_id own_rank() {
  return rank_id{session::current().rank()};
}

const rank_layout& own_layout() {
  return session::current().layout();
}

exchange& exchange_of_rank() {
  return session::current().internals().exchange();
}

std::string wait_name(const char* what, const comm_group& kind) {
  return std::string{"smp."} + what + '.' + to_string(kind);
}

/// A value, and the type that the sender gave it: bytes of another type might
/// parse as well. All ranks run one build, so type names are comparable.
struct typed_value {
  std::string type;
  payload value;
};

template <class Inspector>
bool inspect(Inspector& f, typed_value& x) {
  return f.object(x).fields(f.field("type", x.type), f.field("value", x.value));
}

payload with_type(const std::type_info& type, const payload& x) {
  return to_payload(typed_value{type.name(), x});
}

payload without_type(const payload& x, const std::type_info& type,
                     const char* what, rank_id from) {
  auto result = from_payload<typed_value>(x, what);
  if (result.type == type.name())
    return std::move(result.value);
  throw error{failure{error_code::protocol,
                      from,
                      {},
                      std::string{what} + ": it sent "
                        + c10::demangle(result.type.c_str()) + " where rank "
                        + std::to_string(own_rank().value) + " takes "
                        + c10::demangle(type.name())}};
}

} // namespace

// -- ranks and groups ---------------------------------------------------------

uint64_t rank() {
  return session::current().rank();
}

uint64_t size() {
  return session::current().size();
}

uint64_t local_rank() {
  return own_layout().local_rank(own_rank());
}

uint64_t local_size() {
  return own_layout().local_size(own_rank());
}

uint64_t pp_rank() {
  return detail::position_in(comm_group::pp);
}

uint64_t pp_size() {
  return own_layout().size(comm_group::pp);
}

uint64_t tp_rank() {
  return detail::position_in(comm_group::tp);
}

uint64_t tp_size() {
  return own_layout().size(comm_group::tp);
}

uint64_t rdp_rank() {
  return detail::position_in(comm_group::rdp);
}

uint64_t rdp_size() {
  return own_layout().size(comm_group::rdp);
}

uint64_t dp_rank() {
  return detail::position_in(comm_group::dp);
}

uint64_t dp_size() {
  return own_layout().size(comm_group::dp);
}

uint64_t data_rank() {
  return detail::position_in(data_group(session::current().config()));
}

uint64_t data_size() {
  return own_layout().size(data_group(session::current().config()));
}

uint64_t mp_rank() {
  return detail::position_in(comm_group::mp);
}

uint64_t mp_size() {
  return own_layout().size(comm_group::mp);
}

std::vector<uint64_t> get_group(const comm_group& kind) {
  std::vector<uint64_t> result;
  for (auto x : own_layout().members(kind, own_rank()))
    result.push_back(x.value);
  return result;
}

void barrier(const comm_group& kind) {
  async::barrier(kind).get();
}

void pp_barrier() {
  barrier(comm_group::pp);
}

void tp_barrier() {
  barrier(comm_group::tp);
}

void rdp_barrier() {
  barrier(comm_group::rdp);
}

void dp_barrier() {
  barrier(comm_group::dp);
}

void mp_barrier() {
  barrier(comm_group::mp);
}

// -- values -------------------------------------------------------------------

namespace detail {

uint64_t position_in(const comm_group& kind) {
  return own_layout().rank(kind, own_rank());
}

void send_value(uint64_t to, const rank_type& type, const std::type_info& of,
                const payload& x) {
  exchange_of_rank().send(own_layout().named(type, to, own_rank()), value_name,
                          with_type(of, x));
}

payload receive_value(uint64_t from, const rank_type& type,
                      const std::type_info& of) {
  auto rank = own_layout().named(type, from, own_rank());
  return without_type(exchange_of_rank().receive(rank, value_name), of,
                      "recv_from", rank);
}

void broadcast_value(const comm_group& kind, const std::type_info& of,
                     const payload& x) {
  auto typed = with_type(of, x);
  for (auto to : own_layout().members(kind, own_rank()))
    if (to != own_rank())
      exchange_of_rank().send(to, value_name, typed);
}

std::vector<payload> gather_values(const comm_group& kind,
                                   const std::type_info& of, const payload& x) {
  auto group = own_layout().members(kind, own_rank());
  auto result = exchange_of_rank().all_gather(
    group, wait_name("allgather", kind), with_type(of, x));
  for (size_t i = 0; i < group.size(); ++i)
    result[i] = without_type(result[i], of, "allgather", group[i]);
  return result;
}

} // namespace detail

bool any_rank(bool x, const comm_group& kind) {
  auto all = allgather(x, kind);
  return std::find(all.begin(), all.end(), true) != all.end();
}

} // namespace smp
