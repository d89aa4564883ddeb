#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

// The checker says at launch, whatever the timing, that a kernel's access is
// not ordered after one before it. It follows streams, events, waits of the
// host and notifications by vector clocks. What it misses: all host threads
// share one clock, so what only they order among each other is never reported;
// it is blind to other processes and to what the host does with pinned memory.
// Accesses are ranges of bytes, so two interleaved views of one buffer that do
// not meet are reported all the same.

namespace smp::sim {

/// What a kernel touches, in device addresses.
struct access {
  const void* begin;
  size_t size;
  bool write;
};

/// How many unordered accesses the checker has found.
uint64_t races_found();

/// The last one: "write by aten::fill_ on stream #2 is not ordered after read
/// by aten::mul on stream #1".
std::string last_race();

void forget_races();

} // namespace smp::sim
