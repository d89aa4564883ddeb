#pragma once

// A comparison that has never found a difference proves nothing, so a test
// seeds faults and checks that `smp-train verify` finds them. Who decides
// whether one happens is defined nowhere in smp: tests preload a library that
// does (tests/faults). Elsewhere the symbol is null, and SMP_FAULT false.

namespace smp {

/// @returns whether this fault happens in the calling thread
[[gnu::weak]] bool fault_is_seeded(const char* name) noexcept;

} // namespace smp

#define SMP_FAULT(name)                                                        \
  (::smp::fault_is_seeded != nullptr && ::smp::fault_is_seeded(name))
