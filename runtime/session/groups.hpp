#pragma once

// The calling rank's place in its groups, and values exchanged between ranks
// for decisions, logs or gathers outside of the model. The tensors of a model
// travel without these.

#include "partition/rank_layout.hpp"
#include "runtime/values/tensor_bytes.hpp"
#include "transport/container_bytes.hpp"

#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>
#include <typeinfo>
#include <vector>

namespace smp {

// -- ranks and groups of the current session ----------------------------------

uint64_t rank();
uint64_t size();
uint64_t local_rank();
uint64_t local_size();
uint64_t pp_rank();
uint64_t pp_size();
uint64_t tp_rank();
uint64_t tp_size();
uint64_t rdp_rank();
uint64_t rdp_size();
uint64_t dp_rank();
uint64_t dp_size();
uint64_t mp_rank();
uint64_t mp_size();

/// The part of each batch that the calling rank has, and the number of parts:
/// by dp_rank, or with `prescaled_batch` by rdp_rank.
uint64_t data_rank();
uint64_t data_size();

/// The ranks in the calling rank's group of this kind, ascending.
std::vector<uint64_t> get_group(const comm_group& kind);

/// Waits for all ranks of the world, the pipeline group, ...
void barrier(const comm_group& kind = comm_group::world);
void pp_barrier();
void tp_barrier();
void rdp_barrier();
void dp_barrier();
void mp_barrier();

// -- values -------------------------------------------------------------------
// Numbers, strings, tensors, vectors, sets, maps, pairs, tuples, optionals and
// variants of them, and structs with an `inspect`. A wait fails if the other
// rank dies or if nothing can make progress any more, and the error names what
// was waited for; a wait for a rank that is computing is reported after
// `stall_timeout` (R7). All throw error (config) for a rank that does not
// exist, and (protocol) if the other rank sent a value of another type.

namespace detail {

/// The type as which a `T` is sent: a string literal as a string.
template <class T>
using sent_as = std::conditional_t<
  std::is_convertible_v<const T&, std::string_view>, std::string, T>;

/// Position of the calling rank in its group.
uint64_t position_in(const comm_group& kind);

void send_value(uint64_t to, const rank_type& type, const std::type_info& of,
                const payload& x);

payload receive_value(uint64_t from, const rank_type& type,
                      const std::type_info& of);

void broadcast_value(const comm_group& kind, const std::type_info& of,
                     const payload& x);

std::vector<payload> gather_values(const comm_group& kind,
                                   const std::type_info& of, const payload& x);

} // namespace detail

/// Sends a value to a rank, which must call `recv_from`. Does not wait. Values
/// from one rank to another arrive in the order in which they were sent.
/// @param to position in the caller's group of kind `type`
template <class T>
void send(const T& x, uint64_t to, const rank_type& type = rank_type::world) {
  using value = detail::sent_as<T>;
  detail::send_value(to, type, typeid(value), to_payload(value(x)));
}

/// Waits for the next value from a rank: from its `send` or its `broadcast`.
/// @param from position in the caller's group of kind `type`
template <class T>
T recv_from(uint64_t from, const rank_type& type = rank_type::world) {
  return from_payload<T>(detail::receive_value(from, type, typeid(T)),
                         "value of recv_from");
}

/// @returns the value of rank `root`, on every rank of the group. Others may
/// call `recv_from` instead.
template <class T>
auto broadcast(const T& x, const comm_group& kind = comm_group::world,
               uint64_t root = 0) {
  using value = detail::sent_as<T>;
  if (detail::position_in(kind) != root)
    return recv_from<value>(root, kind);
  value result(x);
  detail::broadcast_value(kind, typeid(value), to_payload(result));
  return result;
}

/// @returns the values of all ranks of the group, by position.
/// Collective.
template <class T>
std::vector<detail::sent_as<T>>
allgather(const T& x, const comm_group& kind = comm_group::world) {
  using value = detail::sent_as<T>;
  std::vector<value> result;
  for (auto& y :
       detail::gather_values(kind, typeid(value), to_payload(value(x))))
    result.push_back(from_payload<value>(y, "value of allgather"));
  return result;
}

/// @returns whether `x` is true on any rank of the group, the same on all
/// ranks. Collective.
bool any_rank(bool x, const comm_group& kind = comm_group::world);

} // namespace smp
