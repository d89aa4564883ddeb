#pragma once

#include "actors/order/step_record.hpp"
#include "partition/schedule/program.hpp"
#include "transport/inspect.hpp"

#include <cstdint>
#include <vector>

namespace smp {

/// The order of a whole pipeline.
struct pipeline_order {
  std::vector<std::vector<served_segment>> served; // by pp_rank
  std::vector<task> admission;
};

template <class Inspector>
bool inspect(Inspector& f, served_segment& x) {
  return f.object(x).fields(f.field("execution", x.execution),
                            f.field("segment", x.segment));
}

template <class Inspector>
bool inspect(Inspector& f, pipeline_order& x) {
  return f.object(x).fields(f.field("served", x.served),
                            f.field("admission", x.admission));
}

/// Constraints on a computed order.
struct order_rules {
  std::vector<service_order> service; // by pp_rank
  /// Which segments of a microbatch do work and which only pass results on,
  /// indexed like `ready_key::segment`. Empty if unknown.
  pipeline_program program = {};
  /// A microbatch starts only when the one before it has finished its forward
  /// phase, as modules that change state require (R19).
  bool forward_alone = false;
};

/// The sequence in which a rank serves requests depends on timing, and so do
/// the last bits of gradients that several microbatches accumulate. This
/// function computes a sequence that does not: it simulates a recorded flow
/// under the schedule as if, on each rank, the forward phase of a microbatch
/// took one unit of time, the backward phase two, and messages and passing on
/// results none. The result is the free order on balanced stages. A segment
/// ends where its execution returns the token; promises that it sent have
/// arrived by then.
/// @param ranks the record of each rank, by pp_rank; its order is ignored
/// @throws error (internal) if the records do not belong together
pipeline_order compute_order(const std::vector<step_record>& ranks,
                             const std::vector<rank_id>& pipeline,
                             schedule& policy, const order_rules& rules);

/// A digest that is equal for the orders of two pipelines if and only if ranks
/// at the same place do the same work in the same sequence. It leaves out
/// request numbers: these also count waits, and whether a rank had to wait, for
/// peers or for remote results, depends on timing.
/// @param ranks the records that the first of `pipeline` used for the order
/// @throws error (protocol) naming that rank unless it serves each segment once
std::vector<uint64_t> likeness_of(const pipeline_order& order,
                                  const std::vector<step_record>& ranks,
                                  const std::vector<rank_id>& pipeline);

} // namespace smp
