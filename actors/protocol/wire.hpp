#pragma once

// How requests, responses and the ends of microbatches and steps look between
// ranks. All ranks run the same build on the same kind of machine, so numbers
// keep the machine's form (little-endian); every length is checked.
//
// request:  form u8, origin u64, number u64
//           0 in full:     step u64, microbatch u64, turn u64, module u64,
//                          phase u8; then the body
//           1 as recorded: nothing but the tensors (R33)
// response: form u8, origin u64, number u64
//           0 in full:     failure; then the body
//           1 as recorded: nothing but the tensors (R33)
// control:  kind u8, step u64, then
//           0 microbatch_done: microbatch u64
//           1 step_failed:     failure
//           2 step_report:     failure, count u64, per value (bytes u64,
//                              tensors u64), then the bytes of all values
//           3 rank_report:     pp_rank u32, busy u8, bytes u64
//           4 forward_over:    turn u64
//           5 step_plan:       mode u8, key u64, replayed step u64
//           6 step_diverged:   text string
// failure:  code u8 (0: none, and nothing follows), rank u64, module string,
//           text string
// string:   length u32, then the bytes

#include "actors/protocol/messages.hpp"
#include "transport/fabric.hpp"

#include <variant>

namespace smp {

message encode(request x);
message encode(recorded_request x);
message encode(response x);
message encode(recorded_response x);
message encode(const microbatch_done& x);
message encode(const step_failed& x);
message encode(const rank_report& x);
message encode(const forward_over& x);
message encode(const step_plan& x);
message encode(const step_diverged& x);

/// The tensors of all values stand one after the other.
message encode(const step_report& x);

using incoming = std::variant<request, recorded_request, response,
                              recorded_response, microbatch_done, step_failed,
                              step_report, rank_report, forward_over, step_plan,
                              step_diverged>;

/// Reads a message of kind request, response or control.
/// @throws error (protocol) naming the first field that makes no sense
incoming decode(message x);

} // namespace smp
