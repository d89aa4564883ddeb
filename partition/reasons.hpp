#pragma once

#include "partition/search/paper.hpp"

namespace smp {

/// Sentences about a decision, see `partition_plan`.
struct explanation {
  std::vector<std::string> warnings;
  std::vector<std::string> reasons;
};

/// @returns a warning for idle devices, and a reason for each part of the
///          decision that may surprise a user: a module that was placed with
///          another one, or one that cannot be placed apart from its parent.
/// @param surplus devices the paper's strategy could not use; else empty.
explanation explain(const model_info& model, const partition_problem& p,
                    const assignment& devices,
                    const std::vector<paper_decision::surplus>& surplus);

} // namespace smp
