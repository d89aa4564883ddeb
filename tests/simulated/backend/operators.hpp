#pragma once

#include <cstdint>
#include <map>
#include <string>

namespace smp::sim {

/// How the operators that have no code of their own were run.
struct operator_counts {
  /// Queued with the shapes that the meta kernel gave.
  uint64_t by_meta = 0;
  /// Queued with the shapes that such arguments gave the first time.
  uint64_t by_memory = 0;
  /// Run while the host waited.
  uint64_t waited = 0;
  std::map<std::string, uint64_t> waited_for;
};

operator_counts counts();

void reset_counts();

} // namespace smp::sim
