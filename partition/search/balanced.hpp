#pragma once

#include "partition/search/problem.hpp"

namespace smp {

/// The paper's strategy finds the optimum for one of ten small random trees,
/// and takes 1.46 times the optimum on average: it cannot leave a branch once
/// it has distributed the devices. This strategy starts from the paper's
/// decision and from splits of the execution order into consecutive pieces, at
/// several grains, and improves them. Small trees are searched exhaustively.
/// @param paper the paper's decision
/// @returns an assignment whose predicted time is not larger than `paper`'s.
assignment balanced_partition(const partition_problem& p,
                              const communication& crossing,
                              const assignment& paper);

} // namespace smp
