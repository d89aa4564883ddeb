#pragma once

#include "actors/order/step_record.hpp"
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

step_flow flow_of(const step_record& record, bool ordered, bool learnt);

/// @param microbatches number of microbatches of the step
/// @throws error (protocol) naming `from` if `flow` is not possible
step_record record_of(const step_flow& flow, rank_id from,
                      uint64_t microbatches);

} // namespace smp
