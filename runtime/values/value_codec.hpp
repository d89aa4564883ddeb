#pragma once

// How a tree of values travels (transport/bytes.hpp). Needs no tensor library,
// so that it can be fuzzed.

#include "runtime/values/value.hpp"
#include "transport/bytes.hpp"

namespace smp {

/// Appends `x`. @throws error (unsupported) above `max_value_depth`
void write(byte_writer& out, const value& x);

/// Reads one value. Memory stays proportional to the bytes read, whatever
/// sizes the bytes claim. Accepts exactly what `write` produces.
/// @throws error (protocol)
value read_value(byte_reader& in);

inline bool inspect(byte_writer& out, value& x) {
  write(out, x);
  return true;
}

inline bool inspect(byte_reader& in, value& x) {
  x = read_value(in);
  return true;
}

} // namespace smp
