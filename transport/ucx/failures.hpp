#pragma once

#include "transport/error.hpp"
#include "transport/ids.hpp"

#include <ucp/api/ucp.h>

#include <cstdint>

namespace smp::ucx {

/// What went on with another rank when UCX gave up.
enum class during : uint8_t {
  nothing, // the connection itself
  sending,
  receiving,
};

/// UCX says with one kind of status that the other side is gone, that this one
/// has no memory, and that somebody asked for nonsense. Only the first is the
/// loss of a rank: what is blamed on one that lives, one looks for in vain.
/// @pre `x` is an error
/// @returns of code `rank_down`, `transport` (bytes could not be moved, the
/// rank may live) or `internal` (a defect of smp)
failure failure_of(ucs_status_t x, rank_id rank, during at);

} // namespace smp::ucx
