#pragma once

namespace smp {

/// Calls each function of MKL's vector mathematics once. MKL chooses its code
/// at the first call of a function; threads that make it at the same time may
/// get code of low accuracy for that one call (some 1000 units in the last
/// place: pytorch/pytorch#188792), so that a first step differs from that of
/// one process. Before a rank has any thread that computes. Later calls do
/// nothing.
void warm_up_vector_math();

} // namespace smp
