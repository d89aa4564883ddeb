#include "runtime/step/schedule_gate.hpp"

#include "partition/schedule/timeline.hpp"
#include "runtime/base/rank_context.hpp"
#include "runtime/collectives/agreement.hpp"
#include "runtime/step/schedule_policies.hpp"

#include <fmt/format.h>

namespace smp {

namespace {

/// A single microbatch is on one rank at a time, so the ranks take turns: that
/// is what the default settings give.
/// @param bubble of one microbatch
std::string advice_on_one(const schedule_policies& policies,
                          const pipeline_program& program,
                          const std::string& pipeline, double bubble) {
  if (program.devices < 2 || pipeline == "actor" || pipeline == "list")
    return {};
  uint64_t more = 2 * program.devices;
  auto report = policies.play(program, more, false);
  if (report.bubble > 0.9 * bubble)
    return {};
  return fmt::format(
    "note: with one microbatch the ranks of a pipeline take "
    "turns; with\n      smp.microbatches = {} the predicted "
    "bubble is {:.1f} %\n",
    more, 100 * report.bubble);
}

} // namespace

void schedule_gate::check(const pipeline_program& program,
                          uint64_t microbatches) {
  if (passed_.contains(microbatches))
    return;
  chunk_of_ = agree(rank_, "smp.schedule", [&] {
    try {
      auto report = policies_.play(program, microbatches, false);
      auto& pipeline = rank_.config().pipeline;
      text_ = schedule_summary(report, pipeline, microbatches);
      if (microbatches == 1)
        text_ += advice_on_one(policies_, program, pipeline, report.bubble);
    } catch (const error& err) {
      if (err.code() == error_code::config)
        throw;
      throw config_error("the schedule is refused: " + err.cause().text);
    }
    // Each rank's service order needs its chunks.
    return policies_.chunks(program, microbatches);
  });
  passed_.insert(microbatches);
}

const std::vector<uint32_t>& schedule_gate::chunk_of(size_t pp_rank) const {
  static const std::vector<uint32_t> none;
  return pp_rank < chunk_of_.size() ? chunk_of_[pp_rank] : none;
}

} // namespace smp
