#pragma once

#include "transport/bytes.hpp"
#include "transport/ids.hpp"

#include <functional>
#include <string>
#include <vector>

namespace smp {

class rank_context;

/// What all ranks of a group must agree on is decided on its first one and
/// told: what each would find by itself may differ, as do measured times.
/// Collective over the group.
/// @param decide runs on the first rank. What it throws is thrown on every
/// rank.
/// @returns the decision
payload agree_on_payload(const rank_context& rank,
                         const std::vector<rank_id>& group,
                         const std::string& name,
                         const std::function<payload()>& decide);

/// Runs `f` on all ranks of the run; then all throw what the first of them that
/// failed threw. Collective over the run.
void do_together(const rank_context& rank, const std::string& name,
                 const std::function<void()>& f);

/// The ranks of the run.
std::vector<rank_id> world_of(const rank_context& rank);

/// The ranks of this pipeline.
const std::vector<rank_id>& pipeline_of(const rank_context& rank);

/// For anything that has an `inspect`; pp_rank 0 decides.
template <class F>
auto agree(const rank_context& rank, const std::string& name, F decide) {
  return from_payload<decltype(decide())>(
    agree_on_payload(rank, pipeline_of(rank), name,
                     [&] { return to_payload(decide()); }),
    "decision");
}

/// The same for all replicas; rank 0 decides.
template <class F>
auto agree_everywhere(const rank_context& rank, const std::string& name,
                      F decide) {
  return from_payload<decltype(decide())>(
    agree_on_payload(rank, world_of(rank), name,
                     [&] { return to_payload(decide()); }),
    "decision");
}

} // namespace smp
