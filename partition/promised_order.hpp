#pragma once

// What a pipeline is where calls do not wait (`smp.fast_mode`), and in which
// order its ranks serve.

#include "partition/program.hpp"

#include <limits>

namespace smp {

/// In `service_place::chunk_of`: where a microbatch turns around. Its body
/// takes the last result of another device and computes the loss; later it
/// begins the backward phase. Also where its code only takes a result and goes
/// on: others wait for that.
inline constexpr uint32_t turn_chunk = std::numeric_limits<uint32_t>::max();

/// @returns `x` without the works that only take a result from one device to
/// the next, but for the last one, where the loss is computed, and for those
/// that wait. Neighbours may be on one device. Where nobody knows what takes
/// time, `x` itself.
pipeline_program promised_program(const pipeline_program& x);

/// @param x a `promised_program`
/// @returns what a service order on `device` wants to know.
service_place promised_place_of(const pipeline_program& x, uint32_t device,
                                uint64_t microbatches);

/// As `interleaved_order`, but a microbatch that turns around goes first.
/// @param warm_up forward segments before the first backward one
service_order sequence_order(service_place x, uint64_t warm_up);

/// Where a microbatch does not return to its caller between two modules, only
/// the service orders keep ranks in step. "Backward before forward" is not
/// enough: until the first loss comes back from pp_rank 0, the last rank runs
/// forward phases, then all backward phases that are waiting, while the ranks
/// before it run dry. Here it alternates between the two, one forward segment
/// ahead, which it works on while pp_rank 0 computes the next loss. On pp_rank
/// 0, a microbatch that turns around goes before everything else: the last rank
/// waits for it, and then all others do.
/// @param name `smp.pipeline`; schedules other than 1F1B and the opportunistic
///        rule run backward phases first
service_order make_promised_order(std::string_view name, service_place x);

} // namespace smp
