#pragma once

#include "transport/fabric.hpp"

#include <cstdint>

namespace smp {

/// Of several messages that wait to leave, the smallest goes first: requests of
/// backward phases, then all that is no request of a forward phase, then those.
/// A microbatch that turns around frees what it holds, one that begins takes
/// more. What a message of a replayed step (R33) asks for, only its record
/// tells: it counts as no request of a forward phase.
uint8_t priority_of(const message& x);

} // namespace smp
