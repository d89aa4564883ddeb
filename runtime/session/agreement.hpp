#pragma once

#include "transport/bytes.hpp"

#include <functional>
#include <string>

namespace smp {

class rank_context;

/// What all ranks of a pipeline group must agree on is decided on pp_rank 0
/// and told: what each would find by itself may differ, as do measured times.
/// Collective over the pipeline group.
/// @param decide runs on pp_rank 0. What it throws is thrown on every rank.
/// @returns the decision
payload agree_on_payload(const rank_context& rank, const std::string& name,
                         const std::function<payload()>& decide);

/// The same for anything that has an `inspect`.
template <class F>
auto agree(const rank_context& rank, const std::string& name, F decide) {
  return from_payload<decltype(decide())>(
    agree_on_payload(rank, name, [&] { return to_payload(decide()); }),
    "decision");
}

} // namespace smp
