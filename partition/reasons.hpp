#pragma once

#include "partition/paper.hpp"

namespace smp {

/// Sentences on a decision, see `partition_plan`.
struct explanation {
  std::vector<std::string> warnings;
  std::vector<std::string> reasons;
};

/// @returns a warning for idle devices, and a reason for each part of the
///          decision that may surprise a user: a module that went with another
///          one, or one that cannot be placed apart from its parent.
/// @param surplus what the paper's strategy could not use; empty for others.
explanation explain(const model_info& model, const partition_problem& p,
                    const assignment& devices,
                    const std::vector<paper_decision::surplus>& surplus);

} // namespace smp
