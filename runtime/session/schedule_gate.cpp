#include "runtime/session/schedule_gate.hpp"

#include "partition/timeline.hpp"
#include "runtime/base/rank_context.hpp"
#include "runtime/session/agreement.hpp"
#include "runtime/session/schedule_policies.hpp"

namespace smp {

void schedule_gate::check(const pipeline_program& program,
                          uint64_t microbatches) {
  if (passed_.contains(microbatches))
    return;
  chunk_of_ = agree(rank_, "smp.schedule", [&] {
    try {
      auto report = policies_.play(program, microbatches, false);
      text_ = schedule_summary(report, rank_.config().pipeline, microbatches);
    } catch (const error& err) {
      if (err.code() == error_code::config)
        throw;
      throw config_error("the schedule is refused: " + err.cause().text);
    }
    // Each rank's order of service needs its chunks.
    return policies_.chunks(program, microbatches);
  });
  passed_.insert(microbatches);
}

const std::vector<uint32_t>& schedule_gate::chunk_of(size_t pp_rank) const {
  static const std::vector<uint32_t> none;
  return pp_rank < chunk_of_.size() ? chunk_of_[pp_rank] : none;
}

} // namespace smp
