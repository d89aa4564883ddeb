// How a rank records steps and replays them (R33).

#include "actors/order/computed_order.hpp"
#include "actors/order/order_book.hpp"
#include "actors/order/step_flow.hpp"
#include "actors/server/microbatch_sequencer.hpp"
#include "partition/rank_layout.hpp"
#include "runtime/base/fnv_hash.hpp"
#include "runtime/base/print_stderr.hpp"
#include "runtime/collectives/agreement.hpp"
#include "runtime/step/model_state.hpp"
#include "runtime/step/schedule_policies.hpp"
#include "runtime/step/step_runner.hpp"
#include "transport/bytes.hpp"
#include "transport/exchange.hpp"

#include <algorithm>
#include <set>
#include <utility>
#include <vector>

namespace smp {

/// @returns how many first steps of a kind differ from later ones:
/// TorchScript runs code once to profile it, forward and then backward; its
/// optimised code then behaves differently (zeros instead of nothing).
size_t step_runner::warm_up(const model_state* model, uint64_t microbatches) {
  return model && model->script() ? (microbatches > 1 ? 1 : 2) : 0;
}

void step_runner::note_record(const model_state* model, uint64_t microbatches,
                              double seconds, bool learnt) {
  auto& records = rank_.records();
  if (!records.active())
    return;
  auto note = records.note();
  stats_.fell_back = !note.divergence.empty();
  stats_.replayed = note.replayed && !stats_.fell_back;
  if (stats_.fell_back && records.fixed_order() && rank_.self() == rank_id{0}
      && !std::exchange(told_of_divergence_, true))
    print_stderr("smp: {}: the last bits of such steps depend on timing\n",
                 note.divergence);
  if (rank_.pp_rank() == 0)
    records.took(rank_.step(), seconds, learnt, warm_up(model, microbatches));
}

/// The key of the record that a step belongs to; on pp_rank 0.
uint64_t step_runner::record_key(const model_state* model,
                                 uint64_t microbatches,
                                 uint64_t signature) const {
  fnv_hash result;
  result.add(signature);
  result.add(microbatches);
  for (auto x : to_payload(call_context::current()).bytes)
    result.add(static_cast<uint64_t>(x));
  if (model) {
    result.add(model->trainability());
    result.add(uint64_t{model->is_training()});
  }
  return result.get();
}

/// Pipelines that share modules replay the same step, or none does: otherwise
/// each could make the others wait for calls that it makes at another place.
void step_runner::agree_on_record() const {
  auto peers = rank_.layout().members(comm_group::tp, rank_.self());
  if (peers.size() == 1)
    return;
  auto& records = rank_.records();
  std::vector<order_book::proposal> all;
  for (auto& x : rank_.exchange().all_gather(peers, "smp.replayed_step",
                                             to_payload(records.propose())))
    all.push_back(from_payload<order_book::proposal>(x, "proposed record"));
  records.agree(all);
}

namespace {

/// @returns `likeness_of` an order, as one number; not 0
uint64_t hash_of(const std::vector<uint64_t>& likeness) {
  fnv_hash result;
  for (auto x : likeness)
    result.add(x);
  return std::max<uint64_t>(result.get(), 1);
}

} // namespace

/// Lets all ranks replay an order that does not depend on timing.
/// @param learnt see `note_record`; then the next step is recorded as well
void step_runner::compute_order(const model_state* model, uint64_t microbatches,
                                bool learnt) {
  auto& records = rank_.records();
  auto note = records.note();
  auto mine = *records.find(note.key, note.step);
  std::vector<step_record> ranks;
  auto ordered = false;
  std::set<module_id> late;
  auto& sequencer = rank_.sequencer();
  auto seen = flow_of(mine, sequencer.used(), learnt);
  seen.called_late = sequencer.called_late();
  auto& pipeline = rank_.pipeline();
  auto all = rank_.exchange().all_gather(pipeline, "smp.recorded_flow",
                                         to_payload(seen));
  for (size_t i = 0; i < all.size(); ++i) {
    auto flow = from_payload<step_flow>(all[i], "flow", pipeline[i]);
    ordered = ordered || flow.ordered;
    learnt = learnt || flow.learnt;
    late.merge(flow.called_late);
    ranks.push_back(record_of(flow, pipeline[i], mine.microbatches));
  }
  sequencer.set_serial(late);
  auto recorded = records.recorded_steps(note.key);
  if (learnt
      && recorded <= warm_up(model, microbatches) + order_book::max_learnt)
    return;
  // A user's schedule may decide differently when it is asked again.
  auto order = agree(rank_, "smp.computed_order", [&] {
    order_rules rules;
    rules.forward_alone = ordered;
    for (size_t i = 0; i < pipeline.size(); ++i)
      rules.service.push_back(policies_.order(microbatches, i,
                                              model ? model->gate().chunk_of(i)
                                                    : std::vector<uint32_t>{}));
    if (model)
      rules.program = policies_.served(model->program());
    auto policy = sequencer.serial() ? make_serial_schedule(microbatches)
                                     : policies_.make_timeless(microbatches);
    return smp::compute_order(ranks, pipeline, *policy, rules);
  });
  auto hash = hash_of(likeness_of(order, ranks, pipeline));
  mine.order = std::move(order.served[rank_.pp_rank()]);
  if (rank_.pp_rank() == 0)
    mine.admission = std::move(order.admission);
  // No execution waited while microbatches ran one after the other.
  for (auto& x : mine.executions)
    x.interrupted.assign(x.interrupted.size(), true);
  records.choose(note.key, note.step, std::move(mine), hash);
}

} // namespace smp
