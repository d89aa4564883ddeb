#pragma once

// How a rank joins a run.

#include "transport/error.hpp"
#include "transport/ids.hpp"

#include <cstdint>
#include <string>
#include <vector>

namespace smp {

/// How a rank introduces itself.
struct member {
  rank_id rank;
  int64_t pid = 0;
  std::string host;
  /// Equal on ranks of the same machine and on no others.
  std::string machine;
  /// Tells runs apart: who belongs to another one by mistake is refused.
  std::string run_id;
  /// These must be equal on all ranks; a rank that differs is refused by name.
  std::string build;
  /// A line "KEY = VALUE" for each setting that all ranks must share.
  std::string settings;
  /// `fabric::address()`, opaque bytes.
  std::string fabric_address;
};

/// Answers a rank that wants to take part: all members, or why not.
struct welcome {
  std::vector<member> members; // by rank
  failure error;
};

} // namespace smp
