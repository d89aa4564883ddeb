#pragma once

// A comparison that has never found a difference proves nothing, so a test
// seeds faults and checks that `smp-train verify` finds them. Only the library
// that CMake builds for that test (smp_faulty) contains them: elsewhere
// SMP_FAULT is false, and not even the name of a fault gets into the binary.

#ifdef SMP_FAULTS

namespace smp {

/// @returns whether the environment selects this fault (SMP_FAULT=NAME) and the
/// calling thread belongs to a session: a lone process is always correct
bool fault_is_seeded(const char* name) noexcept;

} // namespace smp

#  define SMP_FAULT(name) (::smp::fault_is_seeded("smp-fault " name))

#else

#  define SMP_FAULT(name) false

#endif
