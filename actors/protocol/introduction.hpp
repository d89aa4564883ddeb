#pragma once

// How a rank joins a run.

#include "transport/error.hpp"
#include "transport/ids.hpp"

#include <cstdint>
#include <string>
#include <vector>

namespace smp {

struct stall_options {
  /// Seconds without any progress that are worth a report.
  double timeout = 60;
  /// A long wait ends the run; else it is only reported.
  bool end = false;
};

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
  /// What its session says. Of rank 0 it holds for the run, unless who started
  /// the run has said it before.
  stall_options stalls;
};

/// Answers a rank that wants to take part: all members, or why not.
struct welcome {
  std::vector<member> members; // by rank
  failure error;
};

} // namespace smp
