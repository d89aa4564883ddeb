#pragma once

#include "transport/wait.hpp"

namespace smp {

/// A collective that began: what to wait for, and what to say meanwhile.
struct started_collective {
  completion_ptr done;
  wait_reason why;
};

} // namespace smp
