#pragma once

#include "transport/bytes.hpp"
#include "transport/ids.hpp"

#include <functional>
#include <string>
#include <vector>

namespace smp {

class rank_context;

/// Decides on the first rank of a group and broadcasts the decision: the
/// ranks' own findings may differ, as measured times do. Collective over the
/// group.
/// @param decide runs on the first rank. Its exceptions are rethrown on every
/// rank.
/// @returns the decision
payload agree_on_payload(const rank_context& rank,
                         const std::vector<rank_id>& group,
                         const std::string& name,
                         const std::function<payload()>& decide);

/// Runs `f` on all ranks of the run; if it fails anywhere, every rank throws
/// the error of the first failed rank. Collective over the run.
void do_together(const rank_context& rank, const std::string& name,
                 const std::function<void()>& f);

/// The ranks of the run.
std::vector<rank_id> world_of(const rank_context& rank);

/// The ranks of this pipeline.
const std::vector<rank_id>& pipeline_of(const rank_context& rank);

/// For any type with an `inspect`; pp_rank 0 decides.
template <class F>
auto agree(const rank_context& rank, const std::string& name, F decide) {
  return from_payload<decltype(decide())>(
    agree_on_payload(rank, pipeline_of(rank), name,
                     [&] { return to_payload(decide()); }),
    "decision");
}

/// The same across all replicas; rank 0 decides.
template <class F>
auto agree_everywhere(const rank_context& rank, const std::string& name,
                      F decide) {
  return from_payload<decltype(decide())>(
    agree_on_payload(rank, world_of(rank), name,
                     [&] { return to_payload(decide()); }),
    "decision");
}

} // namespace smp
