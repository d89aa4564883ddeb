#pragma once

#include "partition/rank_layout.hpp"
#include "runtime/config/session_config.hpp"

namespace smp {

/// @returns the group whose ranks each take a part of every batch
inline comm_group data_group(const session_config& x) {
  return x.prescaled_batch ? comm_group::rdp : comm_group::dp;
}

} // namespace smp
