#pragma once

#include "actors/replay/step_record.hpp"
#include "partition/program.hpp"
#include "transport/inspect.hpp"

#include <cstdint>
#include <set>
#include <vector>

namespace smp {

/// What a rank did in a step, as far as the order of a step needs it: what it
/// tells the others.
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
  /// It met modules that microbatches pass in their order (R19).
  bool ordered = false;
  /// Calls waited that will not wait in later steps.
  bool learnt = false;
  /// Of these, modules that it called after a first backward.
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

/// @param microbatches of the step
/// @throws error (protocol) naming `from`, if no rank does that
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

/// What an order keeps to.
struct order_rules {
  std::vector<service_order> service; // by pp_rank
  /// What of a microbatch works and what only passes results on, as
  /// `ready_key::segment` counts. Empty where nobody knows.
  pipeline_program program = {};
  /// A microbatch starts when the one before it is past its forward phase:
  /// modules that change state need it (R19).
  bool forward_alone = false;
};

/// The sequence in which a rank serves depends on timing, and so do the last
/// bits of gradients to which several microbatches add. This finds a sequence
/// that does not depend on timing: it plays a recorded flow against the
/// schedule, as if the forward phase of a microbatch took each rank one unit of
/// time, the backward phase two, and passing on what others made and messages
/// none. So it is that of the free order on balanced stages. A segment ends
/// where its execution gives the token back; promises that it sent are there by
/// then.
/// @param ranks the record of each rank, by pp_rank; its order does not count
/// @throws error (internal) if the records do not belong together
pipeline_order compute_order(const std::vector<step_record>& ranks,
                             const std::vector<rank_id>& pipeline,
                             schedule& policy, const order_rules& rules);

/// What the orders of two pipelines have alike if and only if ranks at the same
/// place of each do the same, one after the other. Numbers of requests are not
/// part of it: waits are counted with them, and whether a rank had to wait, for
/// peers or for what came from elsewhere, depends on timing.
/// @param ranks what the order was computed from, on the first of `pipeline`
/// @throws error (protocol) naming that rank unless it serves each segment once
std::vector<uint64_t> likeness_of(const pipeline_order& x,
                                  const std::vector<step_record>& ranks,
                                  const std::vector<rank_id>& pipeline);

} // namespace smp
