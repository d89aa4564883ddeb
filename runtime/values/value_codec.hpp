#pragma once

// Wire format of value trees (transport/bytes.hpp). Needs no tensor library, so
// that it can be fuzzed.

#include "runtime/values/value.hpp"
#include "transport/bytes.hpp"

namespace smp {

/// @throws error (unsupported) above `max_value_depth`
bool inspect(byte_writer& out, value& x);

/// Memory stays proportional to the bytes read, whatever sizes they claim.
/// Accepts exactly what the writer writes.
/// @throws error (protocol)
bool inspect(byte_reader& in, value& x);

} // namespace smp
