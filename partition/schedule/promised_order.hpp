#pragma once

// The program of a pipeline whose calls do not wait (`smp.fast_mode`), and the
// order in which its ranks serve.

#include "partition/schedule/program.hpp"

#include <limits>

namespace smp {

/// In `service_place::chunk_of`: a segment where a microbatch turns around. Its
/// body takes the last result of another device and computes the loss; later it
/// begins the backward phase. Also a segment whose code only takes a result and
/// continues, as others wait for it.
inline constexpr uint32_t turn_chunk = std::numeric_limits<uint32_t>::max();

/// @returns `x` without the works that only pass a result from one device to
/// the next. Keeps the last such work, where the loss is computed, and those
/// that wait. Adjacent works may be on one device. If it is unknown which works
/// take time, returns `x` itself.
pipeline_program promised_program(const pipeline_program& x);

/// @param x a `promised_program`
/// @returns the input of a service order on `device`.
service_place promised_place_of(const pipeline_program& x, uint32_t device,
                                uint64_t microbatches);

/// Like `interleaved_order`, but a microbatch that turns around goes first.
/// @param warm_up forward segments before the first backward segment
service_order sequence_order(service_place x, uint64_t warm_up);

/// If a microbatch does not return to its caller between two modules, only the
/// service orders keep ranks in step. "Backward before forward" is not enough:
/// until the first loss returns from pp_rank 0, the last rank runs forward
/// phases, then all waiting backward phases, while the ranks before it run dry.
/// With this order it alternates between the two, one forward segment ahead, on
/// which it works while pp_rank 0 computes the next loss. On pp_rank 0, a
/// microbatch that turns around precedes everything else: the last rank waits
/// for it, and then all others do.
/// @param name `smp.pipeline`; schedules other than 1F1B and the opportunistic
///        rule run backward phases first
service_order make_promised_order(std::string_view name, service_place x);

} // namespace smp
