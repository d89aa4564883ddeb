#pragma once

#include "transport/wait.hpp"

namespace smp {

/// A collective that has begun: what to wait for, and why, for reports.
struct started_collective {
  completion_ptr done;
  wait_reason why;
};

} // namespace smp
