#pragma once

#include "partition/paper.hpp"

namespace smp {

/// @returns a sentence for each part of the decision that may surprise a user:
///          an idle device, a module that went with another one, one that
///          cannot be placed apart from its parent.
/// @param surplus what the paper's strategy could not use; empty for others.
std::vector<std::string>
explain(const model_info& model, const partition_problem& p,
        const assignment& devices,
        const std::vector<paper_decision::surplus>& surplus);

} // namespace smp
