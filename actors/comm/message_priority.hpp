#pragma once

#include "transport/fabric.hpp"

#include <cstdint>

namespace smp {

/// Of the messages that wait to leave, the one with the smallest value goes
/// first: requests of backward phases, then everything else, then requests of
/// forward phases. A microbatch that turns around frees memory, one that begins
/// takes more. Only the record knows the phase of a message of a replayed step
/// (R33): it counts as "everything else".
uint8_t priority_of(const message& x);

} // namespace smp
