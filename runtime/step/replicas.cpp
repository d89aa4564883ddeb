#include "runtime/step/replicas.hpp"

#include "partition/rank_layout.hpp"
#include "runtime/base/fault.hpp"
#include "runtime/base/fnv_hash.hpp"
#include "runtime/base/rank_context.hpp"
#include "runtime/collectives/agreement.hpp"
#include "runtime/collectives/tensor_collectives.hpp"
#include "runtime/config/session_config.hpp"
#include "runtime/replicas/gradient_buckets.hpp"
#include "runtime/step/model_state.hpp"
#include "runtime/step/step_call.hpp"
#include "runtime/values/tensor_bridge.hpp"
#include "transport/exchange.hpp"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <map>
#include <string>
#include <utility>

namespace smp {

/// A rank's report to the ranks that hold the same modules.
struct replica_outcome {
  failure error = {};
  /// The program is in a scope of `no_sync`.
  bool unsynced = false;
  gradient_report gradients = {};
  /// It runs no more steps.
  bool left = false;
};

template <class Inspector>
bool inspect(Inspector& f, replica_outcome& x) {
  return f.object(x).fields(
    f.field("error", x.error), f.field("unsynced", x.unsynced),
    f.field("gradients", x.gradients), f.field("left", x.left));
}

bool replicas::ends_session(const failure& x) {
  return x.code == error_code::rank_down || x.code == error_code::stalled;
}

std::vector<rank_id> replicas::group() const {
  return rank_.layout().members(comm_group::dp, rank_.self());
}

bool replicas::averages(model_state& model) const {
  return model.replication().unsynced == 0
         && model.buckets()->passes() + 1
              >= rank_.config().backward_passes_per_step
         && !SMP_FAULT("lone-replica");
}

void replicas::begin_step(model_state& model, const step_call& x) const {
  if (left_)
    throw error{left_};
  auto* buckets = model.buckets();
  if (buckets == nullptr)
    return;
  fnv_hash kind;
  kind.add(x.signature);
  kind.add(x.microbatches);
  auto& own_hook = model.replication().own_hook;
  // A function of the program runs when all replicas are there.
  auto early = rank_.config().overlapping_allreduce && averages(model)
               && !own_hook;
  buckets->begin_step(
    {early, kind.get(), x.microbatches, model.replication().hook, own_hook});
}

namespace {

std::vector<replica_outcome> tell(const rank_context& rank,
                                  const std::vector<rank_id>& group,
                                  const replica_outcome& x) {
  std::vector<replica_outcome> result;
  for (auto& y :
       rank.exchange().all_gather(group, "smp.replicas", to_payload(x)))
    result.push_back(from_payload<replica_outcome>(y, "end of a step"));
  return result;
}

} // namespace

namespace {

std::string advice_on_leaving(const rank_context& rank) {
  std::string text
    = "left the run, while this replica trains on: a replica that has no more "
      "batches takes part in the steps of the others with skip()";
  return text
         + (rank.layout().size(comm_group::tp) > 1
              ? ", all ranks that share modules together"
              : "")
         + " (docs/data_parallel.md)";
}

} // namespace

void replicas::leave() {
  if (auto ranks = group(); ranks.size() > 1 && !left_)
    tell(rank_, ranks, {.left = true});
}

namespace {

/// Failures for which a step is rerun: code may have been misled by a promise.
bool is_of_code(const failure& x) {
  return x.code == error_code::user_code || x.code == error_code::unsupported
         || x.code == error_code::config;
}

} // namespace

auto replicas::hear(model_state* model, const failure& mine) -> verdict {
  auto ranks = group();
  if (ranks.size() == 1 || ends_session(mine))
    return {mine, mine && is_of_code(mine)};
  auto* buckets = model ? model->buckets() : nullptr;
  replica_outcome outcome{.error = mine};
  if (buckets) {
    outcome.unsynced = model->replication().unsynced > 0;
    outcome.gradients = buckets->end_step();
  }
  auto told = tell(rank_, ranks, outcome);
  for (size_t i = 0; i < told.size() && !left_; ++i)
    if (told[i].left)
      left_ = {error_code::config, ranks[i], {}, advice_on_leaving(rank_)};
  if (left_)
    return {left_};
  all_ = {};
  first_ = told[0].gradients;
  same_buckets_ = true;
  failure disagreement;
  verdict result{mine, true};
  for (size_t i = 0; i < told.size(); ++i) {
    auto& x = told[i];
    result.of_code = result.of_code && (!x.error || is_of_code(x.error));
    if (x.error && !result.why) {
      result.why = x.error;
      if (result.why.rank == no_rank)
        result.why.rank = ranks[i];
    }
    if (x.unsynced != told[0].unsynced)
      disagreement = {error_code::config,
                      ranks[i],
                      {},
                      "replicas do not agree on no_sync: this step is in its "
                      "scope on some ranks only"};
    same_buckets_ = same_buckets_ && x.gradients.layout == first_.layout;
    all_.merge(x.gradients);
  }
  result.of_code = result.of_code && result.why;
  if (!result.why)
    result.why = disagreement;
  return result;
}

void replicas::take_back(model_state& model) {
  if (auto* buckets = model.buckets())
    buckets->drop(all_);
}

void replicas::end_step(model_state* model, const failure& why) {
  auto* buckets = model ? model->buckets() : nullptr;
  if (!buckets || left_ || ends_session(why))
    return;
  if (why)
    buckets->postpone(all_);
  else
    end_training(*model);
}

void replicas::end_training(model_state& model) const {
  auto& buckets = *model.buckets();
  auto counts = model.replication().unsynced == 0;
  auto now = averages(model);
  auto trained = all_.trained;
  // Ranks that hold other modules must count the same steps, even if no code
  // used the modules of this one.
  if (rank_.config().backward_passes_per_step > 1) {
    auto sum = rank_.exchange().all_reduce_sum(world_of(rank_), "smp.trained",
                                               {trained ? 1.0 : 0.0});
    trained = sum.front() > 0;
    now = now && trained;
  }
  if (now)
    buckets.average(all_, first_, same_buckets_);
  else
    buckets.postpone(all_);
  if (trained && counts)
    buckets.passes() = now ? 0 : buckets.passes() + 1;
  if (all_.trained && rank_.config().broadcast_buffers)
    share_buffers(model);
}

void replicas::compare_parameters(const model_state& model) const {
  auto& map = model.map();
  auto& changing = map.order().changing_parameters();
  if (changing.empty() || group().size() == 1)
    return;
  using slice_id = std::pair<uint32_t, uint64_t>;  // parameter, tp_rank
  std::vector<std::pair<slice_id, uint64_t>> mine; // and its bits
  auto tp_rank = rank_.layout().rank(comm_group::tp, rank_.self());
  for (auto t : changing)
    if (map.owned(t))
      mine.emplace_back(slice_id{t, map.slice(t) ? tp_rank : 0},
                        hash_bits(model.model().tensors[t].tensor).value_or(0));
  auto world = world_of(rank_);
  auto all = rank_.exchange().all_gather(world, "smp.changed_parameters",
                                         to_payload(mine));
  std::map<slice_id, std::pair<rank_id, uint64_t>> first;
  for (size_t i = 0; i < all.size(); ++i)
    for (auto& [id, bits] :
         from_payload<decltype(mine)>(all[i], "parameters")) {
      auto t = id.first;
      auto& known = first.try_emplace(id, world[i], bits).first->second;
      if (bits != known.second)
        throw error{failure{
          error_code::unsupported, world[i], map.name(map.home(t)),
          "forward changed parameter '" + map.tensor_name(t)
            + "' in each replica by its own samples, so that it is now another "
              "one than on rank "
            + std::to_string(known.first.value)
            + ": replicas average gradients, not parameters; keep what forward "
              "changes in a buffer, or train with one replica "
              "(docs/data_parallel.md)"}};
    }
}

void replicas::share_buffers(const model_state& model) const {
  at::NoGradGuard no_grad;
  auto& tensors = model.model().tensors;
  std::vector<std::pair<at::Tensor, tensor_future>> under_way;
  for (uint32_t i = 0; i < tensors.size(); ++i) {
    auto& x = tensors[i];
    if (x.is_buffer && !x.is_attribute && x.tensor.defined()
        && model.map().owned(i) && model.map().slice(i) == nullptr)
      under_way.emplace_back(
        x.tensor, async::broadcast(x.tensor, comm_group::dp, 0, "smp.buffers"));
  }
  auto takes = rank_.layout().rank(comm_group::dp, rank_.self()) > 0;
  for (auto& [x, values] : under_way)
    if (auto y = values.get(); takes)
      at::Tensor{x}.copy_(y);
}

} // namespace smp
