#pragma once

// A comparison that has never found anything proves nothing, so a test seeds
// faults and checks that `smp-train verify` finds them. Only the library
// that CMake builds for that test (smp_faulty) has them: everywhere else
// SMP_FAULT is false, and not even its name gets into the binary.

#ifdef SMP_FAULTS

namespace smp {

/// @returns whether the environment asks for this fault (SMP_FAULT=NAME) and
/// the calling thread belongs to a session: one process alone is always right
bool fault_is_seeded(const char* name) noexcept;

} // namespace smp

#  define SMP_FAULT(name) (::smp::fault_is_seeded("smp-fault " name))

#else

#  define SMP_FAULT(name) false

#endif
