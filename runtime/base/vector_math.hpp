#pragma once

namespace smp {

/// Calls each function of MKL's vector mathematics once. MKL chooses the code
/// of a function at its first call; threads that make this call at the same
/// time may get code of low accuracy for that one call (some 1000 units in the
/// last place: pytorch/pytorch#188792), so that a first step differs from that
/// of one process. Call this before a rank starts any thread that computes.
/// Later calls do nothing.
void warm_up_vector_math();

} // namespace smp
