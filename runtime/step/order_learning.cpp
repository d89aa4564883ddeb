#include "runtime/step/order_learning.hpp"

#include "actors/server/microbatch_sequencer.hpp"
#include "partition/rank_layout.hpp"
#include "runtime/base/rank_context.hpp"
#include "runtime/model/model_map.hpp"
#include "transport/bytes.hpp"
#include "transport/exchange.hpp"

#include <algorithm>
#include <optional>
#include <set>
#include <utility>

namespace smp {

namespace {

using observation = module_order::observation;

/// Buffers of this rank that changed although no call of a module that they
/// order came through smp: code here calls it past its hook, where nothing
/// keeps microbatches in order (R20). (On other ranks such code requests the
/// buffer from this rank, which counts as a call.)
std::set<uint32_t> changed_past_hooks(const rank_context& rank,
                                      const module_order& order,
                                      const observation& mine) {
  auto& sequencer = rank.sequencer();
  auto entered = [&](module_id x) { return sequencer.calls(x) > 0; };
  // A module declared stateful may change the state of others, too.
  if (rank.counters().microbatches < 2
      || std::ranges::any_of(order.unseen(), entered))
    return {};
  auto result = mine.changed;
  std::erase_if(result, [&](uint32_t tensor) {
    return std::ranges::any_of(order.guards(tensor), entered);
  });
  return result;
}

/// The observations of all ranks that end a step together: a pipeline, and all
/// those that share modules with it, as none may fail or release a module
/// alone. Collective over them.
/// @throws error (unsupported), the same on all ranks, if state changed in a
/// module without microbatch order
observation observation_of_all(const rank_context& rank, const model_map& map,
                               const observation& mine) {
  auto group = rank.layout().members(comm_group::mp, rank.self());
  auto all = rank.exchange().all_gather(
    group, "smp.order",
    to_payload(std::pair{mine, changed_past_hooks(rank, map.order(), mine)}));
  observation result;
  std::optional<failure> first;
  for (size_t i = 0; i < all.size(); ++i) {
    auto [other, past] = from_payload<
      std::pair<observation, std::set<uint32_t>>>(all[i],
                                                  "observation of a step");
    result.changed.merge(other.changed);
    result.trained.merge(other.trained);
    if (first || past.empty())
      continue;
    auto tensor = *past.begin();
    first = failure{
      error_code::unsupported, group[i], map.name(map.home(tensor)),
      "its buffer '" + map.tensor_name(tensor)
        + "' changed, but no call of it came through smp, which could not keep "
          "the microbatches in their order: code calls it past its hook, as "
          "with Impl::forward or through a plain pointer; call it by its "
          "smp::submodule or Sequential, or name who changes it with "
          "smp::set_stateful"};
  }
  if (first)
    throw error{*first};
  return result;
}

} // namespace

bool order_learning::pending() const {
  return map_.overlaps() && map_.order().undecided();
}

void order_learning::begin_step() {
  map_.order().before_step(
    [this](uint32_t tensor) { return map_.owned(tensor); });
}

bool order_learning::end_step() {
  auto& sequencer = rank_.sequencer();
  auto mine = map_.order().observe([&](uint32_t i) {
    module_id module{i};
    return map_.owner(module) == rank_.self() && sequencer.calls(module) > 0;
  });
  observation all;
  try {
    all = observation_of_all(rank_, map_, mine);
  } catch (...) {
    map_.order().put_back();
    throw;
  }
  return map_.order().learn(all);
}

} // namespace smp
