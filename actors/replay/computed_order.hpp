#pragma once

#include "actors/replay/step_record.hpp"
#include "partition/program.hpp"
#include "transport/inspect.hpp"

#include <cstdint>
#include <set>
#include <vector>

namespace smp {

/// What a rank did in a step, reduced to what determines the order of the step;
/// it sends this to the other ranks.
struct step_flow {
  struct call {
    call_kind kind = call_kind::remote;
    uint32_t number = 0;
    rank_id owner;
    phase what = phase::forward;
    std::vector<uint64_t> until;
  };

  struct execution {
    request_id id;
    microbatch_id microbatch;
    phase what = phase::forward;
    bool promised = false;
    uint64_t after = 0;
    std::vector<object_id> needs;
    std::vector<call> calls;
  };

  uint64_t microbatches = 0;
  std::vector<execution> executions;
  /// It called modules that microbatches pass in order (R19).
  bool ordered = false;
  /// Some calls waited that will not wait in later steps.
  bool learnt = false;
  /// The ordered modules that it called after a first backward.
  std::set<module_id> called_late = {};
};

template <class Inspector>
bool inspect(Inspector& f, step_flow::call& x) {
  return f.object(x).fields(f.field("kind", x.kind),
                            f.field("number", x.number),
                            f.field("owner", x.owner), f.field("phase", x.what),
                            f.field("until", x.until));
}

template <class Inspector>
bool inspect(Inspector& f, step_flow::execution& x) {
  return f.object(x).fields(
    f.field("id", x.id), f.field("microbatch", x.microbatch),
    f.field("phase", x.what), f.field("promised", x.promised),
    f.field("after", x.after), f.field("needs", x.needs),
    f.field("calls", x.calls));
}

template <class Inspector>
bool inspect(Inspector& f, step_flow& x) {
  return f.object(x).fields(
    f.field("microbatches", x.microbatches),
    f.field("executions", x.executions), f.field("ordered", x.ordered),
    f.field("learnt", x.learnt), f.field("called_late", x.called_late));
}

step_flow flow_of(const step_record& x, bool ordered, bool learnt);

/// @param microbatches number of microbatches of the step
/// @throws error (protocol) naming `from` if `x` is not a possible flow
step_record record_of(const step_flow& x, rank_id from, uint64_t microbatches);

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
std::vector<uint64_t> likeness_of(const pipeline_order& x,
                                  const std::vector<step_record>& ranks,
                                  const std::vector<rank_id>& pipeline);

} // namespace smp
