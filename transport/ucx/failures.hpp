#pragma once

#include "transport/error.hpp"
#include "transport/ids.hpp"

#include <ucp/api/ucp.h>

#include <cstdint>

namespace smp::ucx {

/// What was in progress with another rank when UCX gave up.
enum class during : uint8_t {
  nothing, // the connection itself
  sending,
  receiving,
};

/// UCX has one kind of status for a peer that is gone, for a lack of memory on
/// this side, and for invalid arguments. Only the first is the loss of a rank:
/// blaming a rank that is alive leads a search astray.
/// @pre `x` is an error
/// @returns of code `rank_down`, `transport` (bytes could not be moved, the
/// rank may live) or `internal` (a defect of smp)
failure failure_of(ucs_status_t x, rank_id rank, during at);

} // namespace smp::ucx
