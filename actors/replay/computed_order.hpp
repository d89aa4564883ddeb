#pragma once

#include "actors/replay/step_record.hpp"

#include <cstddef>
#include <span>
#include <vector>

namespace smp {

/// What a rank does in a step, as far as the order of a step needs it.
std::vector<std::byte> encode_flow(const step_record& x);

/// @throws error (protocol) if that is no flow
step_record decode_flow(std::span<const std::byte> xs);

/// The order of a whole pipeline.
struct pipeline_order {
  std::vector<std::vector<served_segment>> served; // by pp_rank
  std::vector<task> admission;
};

/// Which sequence a rank serves in is a matter of timing, and with it the last
/// bits of gradients that several microbatches add up. This finds a sequence
/// that no timing has a part in: it plays a recorded flow against the schedule,
/// where each segment takes the same time and messages take none.
/// @param ranks the record of each rank, by pp_rank; its order does not count
/// @param forward_alone a microbatch starts when the one before it is past its
///        forward phase: modules that change state need it (R19)
/// @throws error (internal) if the records do not belong together
pipeline_order compute_order(const std::vector<step_record>& ranks,
                             const std::vector<rank_id>& pipeline,
                             schedule& policy,
                             const std::vector<service_order>& orders,
                             bool forward_alone);

} // namespace smp
